from mindspeed_patches.patching import PatchManager

MindSpeedPatchesManager = PatchManager()
