"""The one loop that drives a device: schedule, forward, sample, commit.

`max_in_flight` 1 is the plain alternation; 2 hides the host behind the device; pipelines use stages + 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from octavo._core import EngineCore
from octavo.engine.plan import Int32Array, StepPlan, StepResult


class StepInFlight(Protocol):
    """A step whose forward pass has been enqueued."""

    step_id: int
    num_rows: int
    mask_after_step: int
    """The step that must be committed before this one may be sampled, 0: at once; −1: it has no grammar rows."""
    sampled: bool

    def sample(self, masks: Int32Array | None = None) -> None:
        """Enqueues the draw of this step's tokens and appends them to the slot state.

        Args:
            masks: `[R, ceil(V / 32)]`: the tokens that each row may draw; given if there are grammar rows.
        """

    def wait(self) -> StepResult:
        """Waits for the device and returns what `commit` needs."""


class Runner(Protocol):
    """Owner of the device. Never synchronises in `forward`."""

    def forward(self, plan: StepPlan) -> StepInFlight:
        """Applies the plan to the slot state and enqueues the forward pass."""


def run(core: EngineCore, runner: Runner, plans: Sequence[StepPlan], max_in_flight: int) -> None:
    """Runs steps until the core is shut down.

    Args:
        core: the control plane; its outputs leave inside Rust.
        runner: owner of the device.
        plans: `max_in_flight + 1` buffers, used in turn: the oldest step's buffer is never overwritten before its commit.
        max_in_flight: steps scheduled before the first of them is settled.
    """
    inflight: deque[StepInFlight] = deque()
    committed = 0
    turn = 0

    def sample_ready() -> None:
        for step in inflight:
            if not step.sampled and step.mask_after_step <= committed:
                masks = core.masks(step.step_id, step.num_rows) if step.mask_after_step >= 0 else None
                step.sample(masks)

    while not core.is_shut_down():
        plan = plans[turn]
        scheduled = core.schedule(plan.buffer)
        if scheduled:
            turn = (turn + 1) % len(plans)
            inflight.append(runner.forward(plan))
        sample_ready()
        if inflight and (not scheduled or len(inflight) == max_in_flight):
            step = inflight.popleft()
            core.commit(step.step_id, *step.wait())
            committed = step.step_id
            sample_ready()
        if not scheduled and not inflight:
            core.wait()
