"""Messages between ranks of one host through shared memory: places and their reuse, and collectives of real ranks."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch_rank_functions as on_rank
from torch.testing._internal.distributed.fake_pg import FakeStore

from hp_dtensor.exceptions import CollectiveError, LaunchError
from hp_platform_torch.comm import shared_memory
from hp_platform_torch.comm.shared_memory import GatheredRows, JoinedTensors, SharedMemory, connect_memory


def pair():
    """Return the shared memories of two ranks that have met."""
    store = dist.HashStore()
    first, second = SharedMemory(0, 2, store), SharedMemory(1, 2, store)
    assert [first.reaches(1), second.reaches(0)] == [True, True]
    return first, second


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64])
def test_a_message_has_the_bits_of_its_tensor(dtype):
    first, second = pair()
    x = torch.randint(0, 2, (1000, 3)).to(dtype)
    received = torch.empty_like(x)
    (place,) = first.put(x, [1])
    sent = x.clone()
    x.zero_()  # the message is a copy
    second.take(received, place, 0)
    assert torch.equal(received, sent)


def test_a_place_is_reused_when_all_receivers_have_taken_it(monkeypatch):
    monkeypatch.setattr(shared_memory, "ROTATION_BYTES", 0)  # every search starts at the first place
    first, second = pair()
    x = torch.ones(1000)
    kept, taken = first.put(x, [1])[0], first.put(x, [1, 1])
    assert taken[0].offset == taken[1].offset > kept.offset
    second.take(x, taken[0], 0)
    assert first.put(x, [1])[0].offset > taken[0].offset, "one of its two receivers has not taken it"
    second.take(x, taken[1], 0)
    assert first.put(x, [1])[0].offset == taken[0].offset, "the first gap that fits"
    assert first.put(torch.ones(2000), [1])[0].offset > taken[0].offset


def test_messages_take_turns_through_the_outbox(monkeypatch):
    monkeypatch.setattr(shared_memory, "ROTATION_BYTES", 2**13)
    first, second = pair()
    x = torch.ones(2**10)

    def offset_once_taken():
        (place,) = first.put(x, [1])
        second.take(x, place, 0)
        return place.offset

    start = offset_once_taken()
    assert [offset_once_taken() - start for _ in range(4)] == [2**12, 0, 2**12, 0]
    (kept,) = first.put(x, [1])
    assert [offset_once_taken() - kept.offset for _ in range(2)] == [-(2**12)] * 2, "it goes past one in use"
    first.put(x, [1])
    assert offset_once_taken() - kept.offset == 2**12, "it goes on where all turns are in use"


def test_large_messages_stay_within_the_turns(monkeypatch):
    monkeypatch.setattr(shared_memory, "ROTATION_BYTES", 2**13)
    first, second = pair()
    x, places = torch.ones(3 * 2**9), []
    for _ in range(3):
        places += first.put(x, [1])
        second.take(x, places[-1], 0)
    assert places[0].offset == places[1].offset == places[2].offset


def test_what_does_not_fit_has_no_place(monkeypatch):
    monkeypatch.setattr(shared_memory, "OUTBOX_BYTES", 2**14)
    first, second = pair()
    half, received = torch.ones(2**11), torch.empty(2**11)
    places = [first.put(half, [1])[0] for _ in range(2)]
    assert first.put(torch.ones(1), [1]) is None
    second.take(received, places[0], 0)
    assert first.put(torch.ones(2**11 + 1), [1]) is None
    assert first.put(half, [1])[0].offset == places[0].offset


def test_messages_without_a_free_slot_have_no_place(monkeypatch):
    monkeypatch.setattr(shared_memory, "_NUM_SLOTS", 3)
    first, second = pair()
    x = torch.ones(4)
    (place,), _ = first.put(x, [1]), first.put(x, [1])
    assert first.put(x, [1, 1]) is None
    second.take(x, place, 0)
    assert first.put(x, [1, 1]) is not None


def test_a_place_is_not_reused_by_a_thread_that_comes_before_its_message_is_copied():
    first, _ = pair()
    outbox, x, others = first._outbox, torch.ones(1000), []
    lock = outbox._lock

    class Interrupted:
        """The lock; when it is released for the first time, another thread puts its message."""

        def __enter__(self):
            lock.acquire()

        def __exit__(self, *error):
            lock.release()
            if not others:
                others.append(None)
                others[0] = first.put(x, [1])[0]

    outbox._lock = Interrupted()
    (place,) = first.put(x, [1])
    assert place.offset != others[0].offset
    assert place.slot != others[0].slot


def test_a_receive_takes_a_message_or_a_note_of_its_place():
    first, second = pair()
    x = torch.arange(1000.0)
    received = torch.empty_like(x)
    mark = second.mark(received)
    received.copy_(x)
    second.finish(received, mark, 0)
    assert torch.equal(received, x), "the message itself"

    mark = second.mark(received.zero_())
    note = torch.frombuffer(bytearray(first.note(x, first.put(x, [1])[0])), dtype=torch.uint8)
    received.view(torch.uint8)[: len(note)] = note
    second.finish(received, mark, 0)
    assert torch.equal(received, x), "from its place"


def test_gathered_rows_are_placed_and_a_message_is_read_in_place():
    first, second = pair()
    x, index, read = torch.arange(3000.0).view(1000, 3), torch.tensor([7, 0, 7, 999]), []
    rows = GatheredRows(x, index)
    assert (rows.shape, rows.nbytes) == ((4, 3), 48)
    received = torch.zeros(4, 3)
    (place,) = first.put(rows, [1])
    x.zero_()  # the message is a copy
    second.take(received, place, 0, lambda message: read.append(message.clone()))
    assert read[0].tolist() == [[21, 22, 23], [0, 1, 2], [21, 22, 23], [2997, 2998, 2999]]
    assert not received.any(), "nothing is copied"
    assert not first._outbox.mapping.bytes[place.slot], "the place is released"


def test_a_message_that_is_too_short_is_an_error():
    first, second = pair()
    x, received = torch.ones(1000), torch.zeros(2000)
    mark = second.mark(received)
    received[:1000] = x
    with pytest.raises(CollectiveError, match="rank 0 sent fewer bytes, expected 8000"):
        second.finish(received, mark, 0)
    note = torch.frombuffer(bytearray(first.note(x, first.put(x, [1])[0])), dtype=torch.uint8)
    received.view(torch.uint8)[: len(note)] = note
    with pytest.raises(CollectiveError, match="rank 0 sent 4000 bytes, expected 8000"):
        second.finish(received, mark, 0)


def test_a_peer_that_has_not_mapped_the_outbox_gets_no_place():
    store = dist.HashStore()
    first, second = SharedMemory(0, 2, store), SharedMemory(1, 2, store)
    assert first.reaches(1)
    assert first.put(torch.ones(4), [1]) is None
    assert second.reaches(0)
    assert first.put(torch.ones(4), [1]) is not None


def test_a_peer_whose_outbox_cannot_be_opened_gets_no_message_through_memory(monkeypatch):
    store = dist.HashStore()
    first, second = SharedMemory(0, 2, store), SharedMemory(1, 2, store)
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory.os, "open", lambda *_: (_ for _ in ()).throw(PermissionError()))
        assert second.reaches(0), "it expects notes all the same: the first rank does not know it"
    assert first.reaches(1)
    assert first.put(torch.ones(4), [1]) is None


def test_another_file_of_the_same_number_is_not_mapped():
    store = dist.HashStore()
    first, second = SharedMemory(0, 2, store), SharedMemory(1, 2, store)
    first._outbox.mapping.bytes[0] ^= 1
    assert second.reaches(0)
    assert first.put(torch.ones(4), [1]) is None


def test_a_file_that_is_no_outbox_is_not_opened(tmp_path):
    with (tmp_path / "file").open("wb") as file, pytest.raises(ValueError, match="another process"):
        shared_memory._Mapping.of_process(os.getpid(), file.fileno(), 16, "00" * 16)


def test_ranks_of_other_hosts_are_not_reached(monkeypatch):
    store = dist.HashStore()
    first = SharedMemory(0, 3, store)
    monkeypatch.setattr(shared_memory, "_host", lambda: "another host")
    second = SharedMemory(1, 3, store)
    monkeypatch.setattr(shared_memory.machine, "machine", lambda: "aarch64")
    assert connect_memory(2, 3, store) is None
    assert [first.reaches(1), second.reaches(0), first.reaches(2)] == [False, False, False]


def test_a_python_without_memfd_create_has_no_shared_memory(monkeypatch):
    store = dist.HashStore()
    monkeypatch.delattr(shared_memory.os, "memfd_create")
    assert connect_memory(0, 2, store) is None
    monkeypatch.undo()
    assert not SharedMemory(1, 2, store).reaches(0)


def test_torchs_fake_process_group_has_no_shared_memory():
    assert connect_memory(0, 2, dist.PrefixStore("groups", FakeStore())) is None


def test_large_collectives_of_real_ranks(three_ranks):
    placed = three_ranks.run(on_rank.large_collectives, 0)
    # An all-gather, a reduce-scatter, two all-to-alls and an exchange in each of three rounds; two messages in each.
    assert all(counts["all"] == 30 and counts["placed"] >= 20 for counts in placed)


def test_large_collectives_with_little_room(three_ranks):
    placed = three_ranks.run(on_rank.large_collectives, 2**20)
    assert all(counts["all"] == 30 for counts in placed)
    # Nobody receives before its own sends. So in each round one rank sends all its messages before any of them is
    # copied out, and some of them do not fit. A rank that is late may find room for all.
    assert sum(counts["all"] - counts["placed"] for counts in placed) >= 3


def test_messages_are_read_in_place_and_not_written_meanwhile(three_ranks):
    assert sum(three_ranks.run(on_rank.messages_read_in_place, 0)) < 10, "only those to ranks that have not met yet"


def test_messages_without_room_are_read_where_they_are_received(three_ranks):
    # Two messages of 1.5 MiB fit, so some go through memory and some do not, and places are reused at once.
    received = sum(three_ranks.run(on_rank.messages_read_in_place, 2**22))
    assert 10 < received < 3 * 60 * 2


def test_a_place_is_released_if_its_reader_fails():
    first, second = pair()
    (place,) = first.put(torch.ones(4), [1])
    with pytest.raises(ZeroDivisionError):
        second.take(torch.ones(4), place, 0, lambda message: 1 / 0)
    assert not first._outbox.mapping.bytes[place.slot]


@pytest.mark.parametrize("n", [10, 2**18])
def test_after_an_error_of_a_reader_later_messages_are_read_once(three_ranks, n):
    for rank, (found, num_placed) in enumerate(three_ranks.run(on_rank.messages_after_an_error_of_a_reader, n)):
        others = [j for j in range(3) if j != rank]
        later = [[value + j] for value in (200.0, 300.0, 400.0) for j in others]
        assert found == [[100.0 + others[0]], *later]
        assert num_placed == 0


def test_parameters_are_messages():
    first, second = pair()
    weight, read = torch.nn.Parameter(torch.ones(3)), []
    (place,) = first.put(JoinedTensors([weight, weight]), [1])
    second.take(torch.zeros(6), place, 0, lambda message: read.append((message.tolist(), message.requires_grad)))
    assert read == [([1.0] * 6, False)]


def test_joined_tensors_are_placed_in_order():
    first, second = pair()
    tensors, read = [torch.arange(6.0).view(2, 3).T, torch.arange(2.0)], []
    joined = JoinedTensors(tensors)
    assert (joined.shape, joined.nbytes) == ((8,), 32)
    assert joined.gathered().tolist() == [0, 3, 1, 4, 2, 5, 0, 1]
    (place,) = first.put(joined, [1])
    second.take(torch.zeros(8), place, 0, lambda message: read.append(message.tolist()))
    assert read == [[0, 3, 1, 4, 2, 5, 0, 1]]


def test_a_sender_without_room_does_not_wait_until_the_receiver_waits(two_ranks):
    assert two_ranks.run(on_rank.waits_in_different_orders) == [True, True]


def test_sizes_that_differ_are_an_error(two_ranks):
    # "fewer" where the message had no place: rank 1 may not have mapped the outbox yet.
    with pytest.raises(LaunchError, match=r"sent (524288|fewer) bytes, expected 1048576"):
        two_ranks.run(on_rank.exchange_of_different_sizes)
