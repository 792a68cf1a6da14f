"""Replays recorded batches with the real trainer, one run after another.

Only the publisher is the program's own: it writes down what the trainer asks of it, in one list
with the steps of optimizer and scheduler. Everything else is what a run with ``rollout.replay``
uses, from the command line to the exported directory.
"""

import io
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan.grpo.config_checks import check_model, load_config
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.resume.resumption import CheckpointError
from torchtitan.grpo.system.rank_channel import RankChannel
from torchtitan.grpo.system.stop import StopRequest
from torchtitan.grpo.training.guards import GuardStopped
from torchtitan.grpo.training.learner import StepResult
from torchtitan.grpo.training.stage_runner import PipelineRunner
from torchtitan.grpo.weight_sync.publisher import Publisher
from torchtitan.grpo_train import GRPOTrainer


class RecordingPublisher(Publisher):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events, self.num_reserved = events, 0

    def reserve_slot(self) -> int:
        self.num_reserved += 1
        return self.num_reserved - 1

    def fence(self) -> None:
        self.events.append("fence")

    def publish(self, version: int, slot: int) -> None:
        self.events.append(f"publish {version} from slot {slot}")


class RecordedTrainer(GRPOTrainer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.events: list[str] = []
        self.progress_at_start: list[Any] = []
        self.num_in_gaps = 0
        self.spikes: list[str] = []
        if isinstance(self.runner, PipelineRunner):
            self.runner.schedule.run = self.counted(self.runner.schedule.run)
        self.optimizers.step = self.recorded("optimizer", self.optimizers.step)
        self.lr_schedulers.step = self.recorded("scheduler", self.lr_schedulers.step)

    def recorded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def write_down_and_call(*args: Any) -> Any:
            self.events.append(" ".join([name, *map(str, args)]))
            return call(*args)

        return write_down_and_call

    def counted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def run_and_count(*args: Any, waiting: Any = (), **named: Any) -> Any:
            outputs = run(*args, waiting=waiting, **named)
            self.num_in_gaps += sum(rows.num_done for rows in waiting)
            return outputs

        return run_and_count

    def _log_step(self, learned: StepResult) -> None:
        self.spikes += learned.spikes
        super()._log_step(learned)

    def _build_publisher(self) -> RecordingPublisher:
        return RecordingPublisher(self.events)

    def _start_rollouts(self) -> None:
        super()._start_rollouts()
        assert self.source is not None
        self.progress_at_start = progress_of(self)
        self.source.save = self.recorded("save", self.source.save)


def progress_of(trainer: GRPOTrainer) -> list[Any]:
    return [trainer.progress.position, list(trainer.progress.open)]


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    config = load_config(case["arguments"])
    hf_model = read_hf_model(config.model.hf_assets_path)
    check_model(config, hf_model)
    channel = RankChannel(60.0, lambda lost: None)
    try:
        trainer = RecordedTrainer(config, hf_model, StopRequest(60.0), channel)
    except CheckpointError as refusal:
        channel.close()
        return {"error": str(refusal)}
    stopped, shown = "", io.StringIO()
    try:
        with redirect_stdout(shown):
            trainer.train()
    except GuardStopped as stop:
        stopped = str(stop)
    finally:
        trainer.close()
        channel.close()
    exported = Path(config.job.dump_folder) / "hf" / f"step-{trainer.step}"
    if dist.get_rank() == 0 and not stopped:
        file = next(exported.glob("*.safetensors"))
        shutil.copy(file, folder / f"{case['name']}.safetensors")
        shutil.copy(exported / "config.json", folder / f"{case['name']}.json")
    dist.barrier()  # the next run may write into the same folder
    return {
        "events": trainer.events,
        "progress_at_start": trainer.progress_at_start,
        "progress": progress_of(trainer),
        "num_in_gaps": trainer.num_in_gaps,
        "guards": trainer.guards.metrics(),
        "spikes": trainer.spikes,
        "shown": shown.getvalue(),
        "error": stopped,
    }


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    folder = Path(arguments["folder"])
    return {case["name"]: run(case, folder) for case in arguments["cases"]}
