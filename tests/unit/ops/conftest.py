import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small shapes do not gain from threads, and waiting threads spin."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
