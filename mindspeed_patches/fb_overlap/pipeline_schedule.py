"""Megatron's schedules, with the forward and the backward of each slot run as an overlapped pair.

One loop serves training without a pipeline, with a plain pipeline and with a virtual one
(:mod:`commfuse_npu.plan.slots`).  It looks up ``forward_step`` and ``backward_step`` by name in
``megatron.core.pipeline_parallel.schedules`` (core 0.12 to 0.19), so that patches of them apply,
and passes the arguments that the installed version accepts (:mod:`mindspeed_patches.core_pieces`).
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from commfuse_npu.plan.slots import Slot, Step, slots
from mindspeed_patches.core_pieces import supported_keywords
from mindspeed_patches.fb_overlap.core_versions import StepLayout, exchange


class OverlappedSchedule:
    """One training step with the interface of Megatron's ``forward_backward_func``.

    Args:
        overlap: runs a forward and a backward together, by a method ``run`` as that of
            :class:`~commfuse_npu.overlap.ForwardBackwardOverlap`.
    """

    def __init__(self, overlap: Any, **step: Any) -> None:
        from megatron.core import parallel_state, utils
        from megatron.core.pipeline_parallel import schedules

        self._overlap = overlap
        self._parallel = parallel_state
        self._schedules = schedules
        self._step = step
        self._layout = StepLayout(step)
        self._models = self._layout.models
        self._iterators = _list(step["data_iterator"])
        self._config = self._layout.config
        self._virtual = len(self._models) > 1
        self._model_type = utils.get_model_type(self._models[0])
        self._microbatches: int = step["num_microbatches"]
        self._stages = self._layout.stages
        self._stage = self._layout.stage
        self._communicate = exchange(self._layout)
        self._plan = slots(*self._layout.shape())
        self._steps = {
            side: [step for slot in self._plan if (step := getattr(slot, side)) is not None]
            for side in ("forward", "backward")
        }
        self._losses: list[Any] = []
        device = next(self._models[0].parameters()).device
        self._tokens = torch.zeros([], dtype=torch.int, device=device)
        # Input and output of each forward whose backward is to come.
        self._graphs: dict[Step, tuple[Any, Any]] = {}
        self._no_sync: ExitStack | None = None
        self._synchronized: set[int] = set()

    def run(self) -> list[Any]:
        """Run the step; return its losses, which only the last stage has."""
        config = self._config
        schedules = self._schedules
        finalize = config.finalize_model_grads_func
        models = self._models if self._virtual else self._models[0]
        # 1. What Megatron's schedules do before their first forward.
        embedding = None
        last_stage = self._stage == self._stages - 1
        if finalize is not None and self._stages > 1:
            clear = schedules.clear_embedding_activation_buffer
            embedding = clear(config, models, **supported_keywords(clear, is_last_stage=last_stage))
        if config.timers is not None:
            timer = config.timers("forward-backward", log_level=1)
            timer.start(barrier=config.barrier_with_L1_time)
        self._hold_gradients()
        if self._virtual and config.param_sync_func is not None:
            for chunk in (0, 1):
                self._synchronize(config.param_sync_func, chunk)
        # 2. The slots: a forward and a backward side by side, then the exchange with the neighbors.
        arrived: tuple[Any, Any] = None, None
        for slot, following in zip(self._plan, [*self._plan[1:], Slot(None, None)], strict=True):
            arrived = self._exchange(slot, following, *self._run_slot(slot, *arrived))
        # 3. Gradients that no chunk has begun to reduce yet, and Megatron's end of a step.
        self._release_gradients()
        if config.grad_sync_func is not None:
            for chunk in range(len(self._models)):
                if chunk not in self._synchronized:
                    self._synchronize(config.grad_sync_func, chunk)
        if finalize is not None:
            if self._stages > 1:
                finish = schedules.finish_embedding_wgrad_compute
                offered = {"is_last_stage": last_stage, "tp_group": self._layout.tensor}
                finish(config, embedding, **supported_keywords(finish, **offered))
            # finalize takes a group that is None from the parallel state.
            names = "pg_collection", "grad_finalize_pgs", "force_all_reduce"
            offered = {name: self._step.get(name) for name in names}
            passed_on = supported_keywords(schedules.forward_backward_no_pipelining, **offered)
            tokens = self._tokens if config.calculate_per_token_loss else None
            finalize(self._models, tokens, **passed_on)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return self._losses

    def _run_slot(self, slot: Slot, received: Any, received_gradient: Any) -> tuple[Any, Any]:
        """Run a slot; return the output of its forward and the input gradient of its backward."""
        result = None
        gradient = None
        if slot.forward and slot.backward:
            result, gradient = self._overlap.run(
                partial(self._forward, slot.forward, received),
                partial(self._backward, slot.backward, received_gradient),
            )
        elif slot.forward:
            result = self._forward(slot.forward, received)
        elif slot.backward:
            gradient = self._backward(slot.backward, received_gradient)
        if slot.forward is None or result is None:
            return None, gradient
        output, tokens = result
        self._tokens += tokens
        self._graphs[slot.forward] = received, output
        return output, gradient

    def _forward(self, step: Step, received: Any) -> tuple[Any, Any]:
        config = self._config
        model = self._models[step.chunk]
        self._enter_chunk(step.chunk)
        if self._virtual and config.param_sync_func is not None:
            self._begin_parameters(step)
        forward_step = self._schedules.forward_step
        result: tuple[Any, Any] = forward_step(
            self._step["forward_step_func"],
            self._iterators[step.chunk],
            model,
            self._microbatches,
            received,
            self._losses,
            config,
            collect_non_loss_data=self._step.get("collect_non_loss_data", False),
            checkpoint_activations_microbatch=None,
            is_first_microbatch=step.microbatch == 0,
            current_microbatch=step.microbatch,
            **supported_keywords(
                forward_step,
                cp_group_size=self._layout.context.size(),
                vp_stage=step.chunk if self._virtual else None,
                is_last_stage=self._is_last(step),
            ),
        )
        return result

    def _backward(self, step: Step, received: Any) -> Any:
        config = self._config
        last = step.microbatch == self._microbatches - 1
        self._enter_chunk(step.chunk)
        if last and (config.grad_sync_func is None or (not self._virtual and self._stage == 0)):
            self._release_gradients()
            self._synchronized.add(step.chunk)
        backward_step = self._schedules.backward_step
        gradient = backward_step(
            *self._graphs.pop(step),
            received,
            config=config,
            **supported_keywords(
                backward_step,
                model_type=self._model_type,
                pipeline_model_parallel_size=self._stages,
            ),
        )
        if self._virtual:
            if config.grad_sync_func is not None:
                self._begin_gradients(step)
            self._hold_gradients()
        return gradient

    def _exchange(self, slot: Slot, following: Slot, output: Any, gradient: Any) -> tuple[Any, Any]:
        """Send this slot's results to the neighbors and receive the inputs of the next slot."""
        if self._stages == 1:
            return None, None
        send_next = slot.forward is not None and not self._is_last(slot.forward)
        send_previous = slot.backward is not None and not self._is_first(slot.backward)
        from_previous = following.forward is not None and not self._is_first(following.forward)
        from_next = following.backward is not None and not self._is_last(following.backward)
        arrived = None, None
        if send_next or send_previous or from_previous or from_next:
            arrived = self._communicate(
                output if send_next else None,
                gradient if send_previous else None,
                recv_prev=from_previous,
                recv_next=from_next,
                tensor_shape=self._shape(),
            )
        if send_next:
            self._schedules.deallocate_output_tensor(
                output, self._config.deallocate_pipeline_outputs
            )
        return arrived

    def _is_first(self, step: Step) -> bool:
        return self._stage == 0 and step.chunk == 0

    def _is_last(self, step: Step) -> bool:
        return self._stage == self._stages - 1 and step.chunk == len(self._models) - 1

    def _shape(self) -> Any:
        shapes = self._schedules.get_tensor_shapes
        return shapes(
            seq_length=self._step["seq_length"],
            micro_batch_size=self._step["micro_batch_size"],
            decoder_seq_length=self._step.get("decoder_seq_length"),
            config=self._config,
            **supported_keywords(
                shapes,
                rank=self._stage,
                model_type=self._model_type,
                encoder_decoder_xattn=False,
                tp_group=self._layout.tensor,
                cp_group=self._layout.context,
            ),
        )[0]

    # ---------------------------------------------- gradients, parameters, chunks

    def _enter_chunk(self, chunk: int) -> None:
        # Later core versions pass the chunk to forward_step as vp_stage.
        if self._virtual and not supported_keywords(self._schedules.forward_step, vp_stage=chunk):
            self._parallel.set_virtual_pipeline_model_parallel_rank(chunk)

    def _hold_gradients(self) -> None:
        """Enter Megatron's ``no_sync_func``, which postpones the reduction of gradients."""
        if self._no_sync is None:
            self._no_sync = ExitStack()
            for function in _list(self._config.no_sync_func or []):
                self._no_sync.enter_context(function())

    def _release_gradients(self) -> None:
        if self._no_sync is not None:
            self._no_sync.close()
            self._no_sync = None

    def _begin_gradients(self, step: Step) -> None:
        """Start the gradient reduction of the chunk that all stages have finished."""
        ready = self._later("backward", step, -self._stage)
        if ready is not None and ready.microbatch == self._microbatches - 1:
            self._release_gradients()
            self._synchronize(self._config.grad_sync_func, ready.chunk)
            self._synchronized.add(ready.chunk)

    def _begin_parameters(self, step: Step) -> None:
        """Start the parameter gather of the chunk after the one that the last stage enters."""
        ahead = self._later("forward", step, self._stage)
        if ahead is not None and ahead.microbatch == 0 and 1 < ahead.chunk + 1 < len(self._models):
            self._synchronize(self._config.param_sync_func, ahead.chunk + 1)

    def _later(self, way: str, step: Step, by: int) -> Step | None:
        """The step that this stage runs ``by`` steps after ``step`` (before it, if negative)."""
        number = self._steps[way].index(step) + by
        return self._steps[way][number] if 0 <= number < len(self._steps[way]) else None

    def _synchronize(self, functions: Any, chunk: int) -> None:
        """Call ``grad_sync_func`` or ``param_sync_func`` of a chunk."""
        function = functions[chunk] if isinstance(functions, list) else functions
        function(self._models[chunk].parameters())


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
