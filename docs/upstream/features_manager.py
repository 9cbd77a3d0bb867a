# mindspeed_llm/features_manager/__init__.py: an import, and an entry in the list of
# add_tensor_parallel_features, behind those of CoC and MC2.
from mindspeed_patches.feature import CommFuseFeature

features_list.append(CommFuseFeature())
