"""``explain`` gives the decision that calls go by, on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rank_pool import RankPool

from scan_registry import distributed
from scan_registry.distributed import calibration, linear
from scan_registry.distributed.cost import Choice, choose, linear_scan_work
from scan_registry.distributed.machines import MACHINES, Machine

#: Messages cost next to nothing, and reading memory very much, so that nothing is read twice; and the other way round.
PASSING = replace(
    MACHINES["cpu"], name="passing", memory=1e3, call=0.0, send=0.0, hop=0.0, piece=1e-9
)
REDUCING = replace(MACHINES["cpu"], name="reducing", send=1.0)


def explained(
    rank: int, ranks: int, group: Any, machines: list[Machine], schedule: str, recorded: bool
) -> tuple[Choice, int]:
    """The choice, and the pieces of the call itself."""
    gates, tokens = (torch.rand(2, 10 + rank, 256, requires_grad=True) for _ in range(2))
    machine = machines[rank % len(machines)]
    taken = []
    run = linear.Run

    def watched(members: Any, terms: Any, *rest: Any) -> Any:
        taken.append(run(members, terms, *rest).pieces)
        return run(members, terms, *rest)

    how: Any = {"dim": 1, "group": group, "schedule": schedule}
    with torch.set_grad_enabled(recorded), patch.dict(calibration._measured, {group: machine}):
        linear.groups.session(linear.groups.resolve(group)).agreed.clear()
        choice = distributed.explain(gates, tokens, **how)
        with patch.object(linear, "Run", watched):
            distributed.linear_scan(gates, tokens, **how)
    linear.groups.session(linear.groups.resolve(group)).agreed.clear()
    return choice, taken[0]


def pieces(choice: Choice) -> int:
    return choice.pieces if choice.schedule == "pass" else 0


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("machine", [PASSING, REDUCING], ids=lambda machine: machine.name)
def test_it_is_what_the_call_does(ranks: RankPool, machine: Machine, recorded: bool) -> None:
    work = linear_scan_work(
        [10, 11, 12], 512, 4, direction="both" if recorded else "forward", channels=256
    )
    for schedule in ("auto", "reduce", "pass"):
        expected = choose(work, machine, schedule)
        for choice, taken in ranks.run(3, explained, [machine], schedule, recorded):
            assert choice == expected
            assert taken == pieces(choice)
    assert choose(work, machine).schedule == ("pass" if machine is PASSING else "reduce")


def test_where_machines_differ_the_first_rank_decides(ranks: RankPool) -> None:
    (first, taken), (second, also) = ranks.run(2, explained, [PASSING, REDUCING], "auto", True)
    assert first.schedule == second.schedule == "pass"
    assert taken == also == first.pieces == second.pieces
    assert first.reasons[0] == "pass has the shorter predicted time"
    assert "the first rank takes pass" in second.reasons[0]
    assert "it would be reduce" in second.reasons[0]


def refused(rank: int, ranks: int, group: Any) -> str:
    tokens = torch.rand(3, 4 + rank)
    try:
        distributed.explain(tokens, tokens[:, : 4 if rank else 3], group=group)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_what_a_rank_refuses_all_of_them_hear_of(ranks: RankPool) -> None:
    first, second = ranks.run(2, refused)
    assert first.startswith("ValueError")
    assert second.startswith("ValueError")
