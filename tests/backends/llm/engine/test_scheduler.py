"""The scheduler: which tokens go into which step, checked number by number on a toy model."""

from __future__ import annotations

import pytest

from backends.llm.engine.config import SchedulerConfig
from backends.llm.engine.request import FinishReason
from backends.llm.engine.step import MAX_PROMPT_LOGITS, Step
from backends.llm.errors import RequestRefused
from tests.backends.llm.engine.toy import Toy, chunks, plain_answer


def test_prompts_and_decodes_share_a_step():
    toy = Toy()
    toy.add("a", range(6), 4)
    assert chunks(toy.step()[0]) == {"a": 6}
    toy.add("b", range(30, 50), 4)
    # a decodes its one token, b gets what is left of 16; then both are done with their prompts.
    assert chunks(toy.step()[0]) == {"a": 1, "b": 15}
    assert chunks(toy.step()[0]) == {"a": 1, "b": 5}
    assert chunks(toy.step()[0]) == {"a": 1, "b": 1}
    toy.run()
    assert toy.answer("a") == plain_answer(range(6), 4) and toy.answer("b") == plain_answer(range(30, 50), 4)
    toy.assert_all_free()


def test_g24_a_prompt_in_chunks_has_one_first_token_equal_to_that_of_the_whole():
    chunked, whole = Toy(max_num_batched_tokens=4, max_num_seqs=4), Toy()
    for toy in (chunked, whole):
        toy.add("a", range(10), 3)
    logits = [sum(r.num_logits for r in chunked.step()[0].requests) for _ in range(3)]
    assert logits == [0, 0, 1]
    assert len(chunked.answer("a")) == 1
    chunked.run()
    whole.run()
    assert chunked.answer("a") == whole.answer("a") == plain_answer(range(10), 3)


def test_g25_every_step_of_a_long_prompt_has_all_decodes():
    toy = Toy(max_num_batched_tokens=8, max_num_seqs=4, max_model_len=1024, num_blocks=300)
    for name in "abc":
        toy.add(name, [ord(name)], 200)
    toy.step()
    toy.add("long", range(64 * 5), 2)
    steps = 0
    while toy.requests["long"].num_output_tokens == 0:
        output, _ = toy.step()
        assert {name: 1 for name in "abc"} == {n: c for n, c in chunks(output).items() if n != "long"}
        steps += 1
    assert steps == 64  # five tokens are left for it in each step


def test_g26_a_short_prompt_behind_a_long_one_has_its_first_token_in_the_next_step():
    toy = Toy(max_model_len=2048, num_blocks=600)
    toy.add("long", range(64 * 16), 2)
    assert chunks(toy.step()[0]) == {"long": 16}
    toy.add("short", range(2000, 2008), 2)
    # While it waits, the long prompt has half of a step.
    assert chunks(toy.step()[0]) == {"long": 8, "short": 8}
    assert toy.requests["short"].num_output_tokens == 1
    assert chunks(toy.step()[0]) == {"short": 1, "long": 15}


def test_a_second_long_prompt_waits_for_the_first_and_short_ones_pass_it():
    toy = Toy(max_model_len=2048, num_blocks=600)
    toy.add("long1", range(40), 2)
    toy.add("long2", range(100, 140), 2)
    assert chunks(toy.step()[0]) == {"long1": 16}  # nobody else can use the rest of the step
    toy.add("short", range(200, 206), 2)
    assert chunks(toy.step()[0]) == {"long1": 10, "short": 6}
    assert chunks(toy.step()[0]) == {"short": 1, "long1": 14}
    assert chunks(toy.step()[0]) == {"long1": 1, "long2": 15}
    toy.run()
    assert toy.answer("long2") == plain_answer(range(100, 140), 2)


def test_many_short_prompts_do_not_starve_a_long_one():
    toy = Toy(max_model_len=2048, num_blocks=600)
    toy.add("long", range(160), 1)
    steps = 0
    while not toy.requests["long"].finish_reason:
        toy.add(f"s{steps}", range(steps, steps + 8), 1)
        toy.add(f"t{steps}", range(steps, steps + 7), 1)
        toy.step()
        steps += 1
    assert steps <= 40  # at least a quarter of each step: a short prompt under way goes first, and is at most half


def test_a_request_is_preempted_when_blocks_run_out_and_its_answer_stays_the_same():
    toy = Toy(num_blocks=6, max_model_len=24)
    toy.add("a", range(7), 12)
    toy.add("b", range(50, 57), 12)
    toy.run()
    assert toy.requests["b"].num_preemptions >= 1 and toy.requests["a"].num_preemptions == 0
    assert toy.answer("a") == plain_answer(range(7), 12)
    assert toy.answer("b") == plain_answer(range(50, 57), 12)
    toy.assert_all_free()


@pytest.mark.parametrize("length", [4, 5, 8, 9])
def test_g08_no_token_is_lost_where_a_preemption_falls_on_a_block_border(length):
    for at in range(1, 9):
        toy = Toy(num_blocks=8, max_model_len=32)
        toy.add("a", range(length), 12)
        for _ in range(at):
            toy.step()
        toy.scheduler._preempt(toy.requests["a"], Step(0))
        toy.scheduler.check_invariants()
        toy.run()
        assert toy.answer("a") == plain_answer(range(length), 12)


def test_g05_preemption_with_shared_prefixes_in_a_tiny_pool():
    toy = Toy(num_blocks=9, max_model_len=36, max_num_seqs=16)
    prefix = list(range(8))
    for i in range(16):
        toy.add(f"r{i}", [*prefix, i], 10)
    while toy.scheduler.has_requests:
        toy.step()
        for request in toy.scheduler.running:
            assert 0 <= request.num_cached_tokens <= request.num_computed_tokens <= request.num_tokens
    assert sum(r.num_preemptions for r in toy.requests.values()) > 0
    for i in range(16):
        assert toy.answer(f"r{i}") == plain_answer([*prefix, i], 10)
    toy.assert_all_free()


def test_g06_a_prompt_that_is_cached_to_its_end_still_computes_its_last_tokens():
    toy = Toy()
    toy.add("first", range(8), 3)
    toy.run()
    before = toy.runner.num_computed
    toy.add("second", range(8), 3)
    output, _ = toy.step()
    assert chunks(output) == {"second": 4} and output.requests[0].num_computed_tokens == 4
    toy.run()
    assert toy.answer("second") == toy.answer("first") == plain_answer(range(8), 3)
    assert toy.requests["second"].num_cached_tokens == 4
    assert toy.runner.num_computed - before == 4 + 2


def test_g07_a_prefix_is_not_found_before_it_is_computed():
    toy = Toy(max_num_batched_tokens=8, max_num_seqs=4)
    toy.add("a", range(12), 2)
    toy.add("b", range(12), 2)
    toy.run()
    assert toy.answer("a") == toy.answer("b") == plain_answer(range(12), 2)


def test_equal_prompts_computed_side_by_side_end_in_the_same_blocks():
    toy = Toy(max_num_batched_tokens=32)
    toy.add("a", range(8), 6)
    toy.add("b", range(8), 6)
    toy.step()
    tables = [toy.kv.block_ids(name, 8) for name in "ab"]
    assert tables[0] == tables[1] == [0, 1]
    assert toy.kv.pool.num_free_blocks == 62
    toy.run()
    assert toy.answer("a") == toy.answer("b") == plain_answer(range(8), 6)


def test_g10_a_constant_hash_gives_right_answers():
    toy = Toy(hash_function=lambda data: b"same")
    for i in range(6):
        toy.add(f"r{i}", [i, *range(11)], 5)
        toy.run()
    toy.add("again", [0, *range(11)], 5)
    toy.run()
    for i in range(6):
        assert toy.answer(f"r{i}") == plain_answer([i, *range(11)], 5)
    assert toy.answer("again") == toy.answer("r0")


def test_g12_equal_blocks_after_different_ones_and_half_full_blocks_are_not_shared():
    toy = Toy()
    toy.add("ab", [*[1] * 4, *[2] * 4, 9], 1)
    toy.run()
    toy.add("cb", [*[3] * 4, *[2] * 4, 9], 1)
    toy.run()
    toy.add("half", [*[1] * 4, *[2] * 3], 1)
    toy.run()
    assert toy.requests["cb"].num_cached_tokens == 0
    assert toy.requests["half"].num_cached_tokens == 4
    toy.add("salted", [*[1] * 4, *[2] * 4, 9], 1, cache_salt=b"tenant")
    toy.run()
    assert toy.requests["salted"].num_cached_tokens == 0


def test_g19_a_request_that_ends_on_a_block_border_frees_each_block_once():
    toy = Toy()
    toy.add("a", range(6), 2)  # 8 tokens: two full blocks
    toy.run()
    toy.assert_all_free()
    toy.add("b", range(20, 27), 1)
    toy.run()
    toy.assert_all_free()


def test_prompts_that_need_logits_share_the_rows_of_a_step():
    """A row of logits is as wide as the vocabulary; the budget of a step is made for rows of hidden states."""
    toy = Toy(num_blocks=300, max_num_batched_tokens=256, max_model_len=1024)
    toy.add("long", range(200), 1, wants_prompt_logits=True)
    output, _ = toy.step()
    assert chunks(output) == {"long": MAX_PROMPT_LOGITS} and output.num_logits == MAX_PROMPT_LOGITS
    # Neither another of its kind nor one behind that waits until the long one is done.
    toy.add("other", range(20), 1, wants_prompt_logits=True)
    toy.add("plain", range(300, 330), 1)
    output, _ = toy.step()
    assert chunks(output) == {"long": MAX_PROMPT_LOGITS, "other": 1, "plain": 30}
    output, _ = toy.step()
    assert chunks(output) == {"other": 19, "long": MAX_PROMPT_LOGITS - 19}
    toy.run()
    assert toy.answer("long") == plain_answer(range(200), 1) and toy.answer("other") == plain_answer(range(20), 1)
    toy.assert_all_free()


def test_g23_a_request_for_prompt_logits_does_not_use_the_cache():
    toy = Toy()
    toy.add("first", range(10), 2, wants_prompt_logits=True)
    output, _ = toy.step()
    assert output.requests[0].num_logits == 10
    toy.run()
    toy.add("second", range(10), 2, wants_prompt_logits=True)
    output, _ = toy.step()
    assert output.requests[0].num_logits == 10 and toy.requests["second"].num_cached_tokens == 0


def test_g01_a_prompt_that_never_fits_is_refused_with_both_numbers_and_others_go_on():
    toy = Toy(max_model_len=32)
    toy.add("normal", range(5), 3)
    with pytest.raises(RequestRefused, match="the prompt has 40 tokens, 31 are allowed") as refused:
        toy.add("long", range(40), 3)
    assert refused.value.code == "too_long"
    toy.run()
    assert toy.answer("normal") == plain_answer(range(5), 3)


def test_g01_the_pool_limits_the_length_too():
    toy = Toy(num_blocks=4, block_size=4, max_model_len=1024)
    with pytest.raises(RequestRefused, match="the prompt has 16 tokens, 15 are allowed"):
        toy.add("a", range(16), 3)
    toy.add("b", range(15), 3)
    toy.run()
    assert toy.answer("b") == plain_answer(range(15), 1)


def test_g02_an_answer_ends_where_the_context_does():
    toy = Toy(max_model_len=32)
    request = toy.add("a", range(30), 10)
    toy.run()
    assert toy.answer("a") == plain_answer(range(30), 2)
    assert request.finish_reason is FinishReason.LENGTH


def test_refusals_name_what_is_wrong():
    toy = Toy(max_waiting=1, max_num_seqs=1)
    with pytest.raises(RequestRefused, match="no tokens"):
        toy.add("a", [], 3)
    toy.add("a", [1], 3)
    toy.step()
    with pytest.raises(RequestRefused, match="id 'a' is in use"):
        toy.add("a", [1], 3)
    toy.add("b", [1], 3)
    with pytest.raises(RequestRefused, match=r"1 requests wait already, 1 are allowed$") as refused:
        toy.add("c", [1], 3)
    assert refused.value.code == "overloaded"
    toy.run()


@pytest.mark.parametrize("max_waiting", [0, 2])
def test_requests_that_find_a_free_place_do_not_count_as_waiting(max_waiting):
    """They come in one moment, before the next step: as many as run at once, and as many more as may wait."""
    toy = Toy(max_waiting=max_waiting, max_num_seqs=3)
    toy.add("first", [1], 8)
    toy.step()
    for number in range(2 + max_waiting):
        toy.add(f"next{number}", [1], 3)
    message = f"{2 + max_waiting} requests wait already, {max_waiting} are allowed beside those for 2 free places"
    with pytest.raises(RequestRefused, match=message):
        toy.add("one more", [1], 3)
    toy.run()


def test_a_stop_token_ends_an_answer_but_not_before_the_minimum():
    full = plain_answer(range(5), 12)
    stop = frozenset([full[3]])
    first = full.index(full[3])
    toy = Toy()
    toy.add("a", range(5), 12, stop_token_ids=stop)
    toy.add("b", range(5), 12, stop_token_ids=stop, min_output_tokens=first + 2)
    toy.run()
    assert toy.answer("a") == full[: first + 1]
    assert toy.requests["a"].finish_reason is FinishReason.STOP
    assert len(toy.answer("b")) > first + 1


def test_abort_frees_everything_at_every_moment():
    for when in range(6):
        toy = Toy()
        toy.add("a", range(20), 4)
        toy.add("b", range(30, 36), 4)
        for _ in range(when):
            toy.step()
        toy.scheduler.finish("a", FinishReason.ABORT)
        toy.scheduler.check_invariants()
        toy.run()
        assert toy.requests["a"].finish_reason is not None
        assert toy.answer("b") == plain_answer(range(30, 36), 4)
        toy.assert_all_free()


def test_abort_between_schedule_and_update_is_passed_over():
    toy = Toy()
    toy.add("a", range(5), 4)
    toy.add("b", range(30, 36), 4)
    output = toy.scheduler.schedule()
    toy.runner.execute(output)
    toy.scheduler.finish("a", FinishReason.ABORT)
    updates = toy.scheduler.update_from_output(output, {"a": [1], "b": plain_answer(range(30, 36), 1)})
    assert [u.request.request_id for u in updates] == ["b"]
    toy.run()
    assert toy.answer("b") == plain_answer(range(30, 36), 4)
    toy.assert_all_free()


def test_finishing_somebody_unknown_does_nothing():
    assert Toy().scheduler.finish("nobody", FinishReason.ABORT) is None


def test_priorities_decide_who_starts_and_who_is_preempted():
    toy = Toy(policy="priority", max_num_seqs=1)
    toy.add("low", range(4), 2, priority=5)
    toy.add("high", range(10, 14), 2, priority=1)
    toy.run()
    first, second = toy.requests["high"], toy.requests["low"]
    assert first.finish_reason is not None and second.finish_reason is not None
    toy = Toy(policy="priority", num_blocks=6, max_model_len=24)
    toy.add("low", range(7), 12, priority=5)
    toy.add("high", range(50, 57), 12, priority=1, arrival_ns=1)
    toy.run()
    assert toy.requests["low"].num_preemptions > 0 and toy.requests["high"].num_preemptions == 0


def test_longest_prefix_match_takes_cached_prompts_first_but_nobody_waits_for_ever():
    toy = Toy(policy="longest_prefix_match", max_num_seqs=1, num_blocks=256)
    toy.add("warm", range(8), 1)
    toy.run()
    toy.add("cold", range(50, 60), 1)
    for i in range(40):
        toy.add(f"hot{i}", [*range(8), i], 1)
    order = []
    while toy.scheduler.has_requests:
        _, updates = toy.step()
        order += [u.request.request_id for u in updates]
    assert order[0] == "hot0" and order.index("cold") == 32


def test_fair_gives_clients_the_same_number_of_tokens():
    toy = Toy(policy="fair", max_num_seqs=2, num_blocks=256)
    for i in range(20):
        toy.add(f"greedy{i}", range(i, i + 8), 8, client="greedy")
    for i in range(4):
        toy.add(f"modest{i}", range(i, i + 8), 8, client="modest", arrival_ns=1)
    order = []
    while toy.scheduler.has_requests:
        _, updates = toy.step()
        order += [u.request.request_id for u in updates if u.request.finish_reason]
    # Under fcfs the modest client would be the last to be served; here it is served in turn.
    assert all(order.index(f"modest{i}") <= 2 * i + 2 for i in range(4))


def test_fair_does_not_save_up_what_an_absent_client_did_not_use():
    toy = Toy(policy="fair", max_num_seqs=1, num_blocks=256)
    for i in range(6):
        toy.add(f"a{i}", range(i, i + 8), 4, client="a")
    for _ in range(12):
        toy.step()
    for i in range(3):
        toy.add(f"b{i}", range(i, i + 8), 4, client="b", arrival_ns=1)
    order = []
    while toy.scheduler.has_requests:
        _, updates = toy.step()
        order += [str(u.request.request_id)[0] for u in updates if u.request.finish_reason]
    assert sorted(order[:4]) == ["a", "a", "b", "b"]


def test_static_batching_admits_only_when_nothing_runs():
    toy = Toy(batching="static", max_num_seqs=2)
    toy.add("a", range(4), 2)
    toy.add("b", range(10, 14), 5)
    toy.add("c", range(20, 24), 2)
    started = {}
    step = 0
    while toy.scheduler.has_requests:
        output, _ = toy.step()
        for name in chunks(output):
            started.setdefault(name, step)
        step += 1
    assert started == {"a": 0, "b": 0, "c": 5}


def test_drafts_that_are_right_save_steps_and_drafts_that_are_wrong_change_nothing():
    def oracle(request):
        return plain_answer(request.token_ids, 3)

    def half_right(request):
        return [*plain_answer(request.token_ids, 1), 0, 0]

    full = plain_answer(range(6), 13)
    for propose, steps in ((None, 13), (oracle, 4), (half_right, 7)):
        toy = Toy()
        toy.add("a", range(6), 13)
        taken = 0
        while toy.scheduler.has_requests:
            toy.step(propose)
            taken += 1
        assert toy.answer("a") == full
        assert taken == steps
        toy.assert_all_free()


def test_drafts_never_cost_another_request_its_token_or_its_blocks():
    toy = Toy(max_num_batched_tokens=4, max_num_seqs=4)
    for name in "abcd":
        toy.add(name, [ord(name)], 6)
    toy.step()
    for name in "abcd":
        toy.scheduler.set_drafts(name, [1, 2, 3])
    assert chunks(toy.step()[0]) == {"a": 1, "b": 1, "c": 1, "d": 1}
    toy = Toy(num_blocks=2, max_model_len=8)
    toy.add("a", range(4), 3)
    toy.step()
    toy.scheduler.set_drafts("a", [1, 2, 3])
    output, _ = toy.step()
    assert output.requests[0].token_ids[1:] == [1]  # the answer has room for one more after the next token
    toy.run()
    assert toy.answer("a") == plain_answer(range(4), 3)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "less than max_num_seqs 8"),
        ({"policy": "random"}, "one of fcfs, priority"),
        ({"batching": "none"}, "one of continuous, static"),
        ({"max_waiting": -1}, "max_waiting is -1"),
    ],
)
def test_a_configuration_out_of_range_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**fields)
