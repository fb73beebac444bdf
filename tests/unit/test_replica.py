"""What of the machine each of several engine processes takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo import replica
from octavo.config import EngineConfig
from octavo.errors import ParameterError
from octavo.step_time import predict_step_seconds


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No GPUs, unless a test names some."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(replica, "_DRIVER", tmp_path / "none")


def test_one_engine_takes_everything() -> None:
    config = EngineConfig(num_threads=3)
    assert replica.share_machine(config, 0, 1) == (config, 1)


def test_replicas_on_a_cpu_share_its_threads() -> None:
    for count in (2, 3, 1000):
        config, sharers = replica.share_machine(EngineConfig(), 0, count)
        assert config.num_threads == max(1, len(os.sched_getaffinity(0)) // count)
        assert sharers == count
    config, _ = replica.share_machine(EngineConfig(num_threads=5), 1, 2)
    assert config.num_threads == 5, "threads that are asked for are each one's"


def test_each_replica_sees_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(["GPU-b", "7"]):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b, 7,3")
        assert replica.share_machine(EngineConfig(), number, 2) == (EngineConfig(), 1)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == name


def test_all_gpus_of_the_driver_are_there_if_none_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(replica, "_DRIVER", tmp_path)
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / bus).mkdir()
    assert replica.visible_devices() == ["0", "1"]
    with pytest.raises(ParameterError, match=r"data_parallel_size.*at most 2"):
        replica.share_machine(EngineConfig(), 0, 3)
    assert replica.share_machine(EngineConfig(backend="cpu"), 0, 3)[1] == 3, "it needs none"


def test_a_step_takes_longer_with_more_tokens_weights_or_fewer_threads() -> None:
    least = predict_step_seconds(10**8, 10**9, 512, 8)
    assert 0 < least < predict_step_seconds(10**8, 10**9, 1024, 8)
    assert least < predict_step_seconds(10**9, 10**9, 512, 8)
    assert least < predict_step_seconds(10**8, 10**9, 512, 4)
    assert predict_step_seconds(16 * 10**9, 80 * 10**9, 8192, None) < 10
