"""Tensors in system shared memory, on the real server."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from clients import (
    AsyncGrpcClient,
    AsyncHttpClient,
    EncodedBytes,
    GrpcClient,
    HttpClient,
    InputError,
    ServerError,
    SharedMemoryError,
    encode_fixed_width,
)
from clients.base import TritonClient
from clients.shared_memory import SharedBlock
from tests.triton_models import TritonAddress

MIB = 2**20


def our_regions() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"modelkiln_{os.getpid()}_client_*")]


def memory_of(pid: int | str) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, triton: TritonAddress) -> Iterator[TritonClient]:
    found = GrpcClient(triton.grpc_url) if request.param == "grpc" else HttpClient(triton.http_url)
    with found:
        yield found
    gc.collect()
    assert our_regions() == []


def test_inputs_and_outputs_lie_in_a_region(client: TritonClient) -> None:
    with client.shared_memory(4096) as region:
        sent = region.put(np.arange(8, dtype=np.float32).reshape(2, 4))
        got = region.tensor(np.float32, (3, 4))
        assert (sent.offset, got.offset) == (0, 64)
        for turn in range(2):
            sent.array[0, 0] = turn
            answer = client.infer("echo", {"INPUT0": sent}, outputs={"OUTPUT0": got})["OUTPUT0"]
            assert answer.tolist() == [[turn, 1, 2, 3], [4, 5, 6, 7]]
            assert np.shares_memory(answer, got.array)
    assert answer.tolist() == [[1, 1, 2, 3], [4, 5, 6, 7]]  # still there after the region is gone


def test_one_side_may_be_shared_alone(client: TritonClient) -> None:
    with client.shared_memory(4096) as region:
        sent = region.put(np.ones((1, 4), np.float32))
        assert client.infer("echo", {"INPUT0": sent})["OUTPUT0"].tolist() == [[1, 1, 1, 1]]
        places = {"LEFT": region.tensor(np.float32, (1, 4)), "RIGHT": None}
        answer = client.infer("parallel", {"INPUT0": [[1, 2, 3, 4]]}, outputs=places)
        assert answer["LEFT"].tolist() == answer["RIGHT"].tolist() == [[1, 2, 3, 4]]
        assert np.shares_memory(answer["LEFT"], places["LEFT"].array)


def test_a_large_tensor_goes_both_ways(client: TritonClient) -> None:
    count = 16 * MIB // 4
    with client.shared_memory(16 * MIB) as region:
        got = region.tensor(np.float32, (count,))
        values = client.infer("big", {"COUNT": [count]}, outputs={"VALUES": got})["VALUES"]
        assert values[0] == 0 and values[-1] == count - 1 and np.shares_memory(values, got.array)


def test_for_asyncio(triton: TritonAddress) -> None:
    async def call(client: AsyncGrpcClient | AsyncHttpClient) -> None:
        async with client, client.shared_memory(4096) as region:
            sent, got = region.put(np.ones((1, 4), np.float32)), region.tensor(np.float32, (1, 4))
            answer = await client.infer("echo", {"INPUT0": sent}, outputs={"OUTPUT0": got})
            assert answer["OUTPUT0"].tolist() == got.array.tolist() == [[1, 1, 1, 1]]

    for client in (AsyncGrpcClient(triton.grpc_url), AsyncHttpClient(triton.http_url)):
        asyncio.run(call(client))
    assert our_regions() == []


def test_what_does_not_fit_is_refused_before_it_is_sent(client: TritonClient) -> None:
    with client.shared_memory(128) as region:
        with pytest.raises(InputError, match="of 129 bytes does not fit the region: 128 of its 128 bytes are free"):
            region.tensor(np.int8, (129,))
        first = region.tensor(np.int32, (1, 4))
        with pytest.raises(InputError, match="64 of its 128 bytes are free"):
            region.tensor(np.int8, (65,))
        with pytest.raises(
            InputError, match=r"shape \[-1\] is not allowed"
        ):  # numpy's "all the rest" would overlap the next
            region.tensor(np.int8, (-1,))
        with pytest.raises(InputError, match="cannot lie in shared memory"):
            region.tensor(np.object_, (1,))
        with pytest.raises(InputError, match="'INPUT0' is FP32, not INT32"):
            client.infer("echo", {"INPUT0": first})
        with pytest.raises(InputError, match="'OUTPUT0' is FP32, not INT32"):
            client.infer("echo", {"INPUT0": [[1, 2, 3, 4]]}, outputs={"OUTPUT0": first})
        region.clear()
        with pytest.raises(InputError, match="the model wants 4"):
            client.infer("echo", {"INPUT0": region.tensor(np.float32, (1, 5))})
        region.clear()
        small = region.tensor(np.float32, (1, 4))
        with pytest.raises(ServerError):
            client.infer("echo", {"INPUT0": [[1, 2, 3, 4]] * 2}, outputs={"OUTPUT0": small})
    with pytest.raises(InputError, match="0 bytes is not allowed"):
        client.shared_memory(0)


def test_no_room_is_told_with_the_numbers(client: TritonClient) -> None:
    with pytest.raises(SharedMemoryError, match=r"/dev/shm has [0-9]+ bytes free"):
        client.shared_memory(2**50)


def test_a_server_that_cannot_reach_the_region_is_told(client: TritonClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(block: SharedBlock) -> str:
        return "/modelkiln_on_another_host"

    monkeypatch.setattr(SharedBlock, "key", property(elsewhere, lambda block, value: None), raising=False)
    with pytest.raises(SharedMemoryError, match="it must run on this host"):
        client.shared_memory(64)


def test_a_region_that_is_let_go_leaves_no_name(client: TritonClient) -> None:
    region = client.shared_memory(64)
    assert len(our_regions()) == 1
    client._unregister(region)
    del region
    gc.collect()
    assert our_regions() == []


def test_f05_a_thousand_regions_leave_nothing_behind(triton: TritonAddress) -> None:
    with GrpcClient(triton.grpc_url) as client:

        def cycles(count: int) -> None:
            for _ in range(count):
                with client.shared_memory(MIB) as region:
                    sent = region.put(np.ones((1, 4), np.float32))
                    client.infer("echo", {"INPUT0": sent})

        cycles(50)
        before = memory_of(server_pid(triton))
        cycles(1000)
        # Regions that stayed mapped would be 1000 pages in the server, at the least: their touched ones.
        assert memory_of(server_pid(triton)) - before < 3 * MIB
        for pid in ("self", server_pid(triton)):
            assert f"modelkiln_{os.getpid()}_client_" not in Path(f"/proc/{pid}/maps").read_text()
    assert our_regions() == []


def server_pid(triton: TritonAddress) -> int:
    """The process that listens on the server's port, found by its socket."""
    port = f"{int(triton.http_url.rpartition(':')[2]):04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    inode = next(fields[9] for line in lines if (fields := line.split())[1].endswith(f":{port}") and fields[3] == "0A")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if any(os.readlink(link) == f"socket:[{inode}]" for link in (entry / "fd").iterdir()):
                    return int(entry.name)
            except OSError:
                continue
    raise AssertionError("no process listens there")


def test_f11_a_fixed_width_array_is_encoded_once(client: TritonClient) -> None:
    array = np.array([[b"ab\x00", b"", b"abcde"]], dtype="S5")
    encoded = EncodedBytes((1, 1), b"\x01\x00\x00\x00x")
    assert client.infer("echo_text", {"TEXT": encoded})["TEXT_OUT"].tolist() == [[b"x"]]
    whole = encode_fixed_width(array, keep_zeros=True)
    shown = encode_fixed_width(array, keep_zeros=False)
    for _ in range(2):
        assert client.infer("echo_text", {"TEXT": whole})["TEXT_OUT"].tolist() == [
            [b"ab\x00\x00\x00", b"\x00\x00\x00\x00\x00", b"abcde"]
        ]
        assert client.infer("echo_text", {"TEXT": shown})["TEXT_OUT"].tolist() == [[b"ab", b"", b"abcde"]]
