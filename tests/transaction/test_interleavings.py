"""The handler against a model: steps in any order, workers that finish in any order, faults, stops, crashes.

The model knows, of each transaction, what may have become of it: a step that was asked adds a possibility, its answer
leaves one. What must hold whenever everything was answered, and after every crash:

 1. all of a transaction's messages are there, once, in all its targets that are not gone, or none of them;
 2. what was answered as committed is there or on its way, what was answered as rolled back is not;
 3. what was answered as prepared stays so until it is decided;
 4. in every target the decisions lie in the same order, each in one piece;
 5. members of a commit group are there all or none;
 6. nothing is set aside, locked or open for a transaction that is over;
 7. every request gets one answer.

A failure prints the steps; hypothesis replays them. Counts follow TFMQ_TEST_SCALE.
"""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.scale import SEED, scaled, seeded
from tests.transaction.life import KEYS, OPEN_MAX, Life

STEPS = 400
"""Of one walk: long enough for files to roll, checkpoints to pass and several crashes."""

WALK: dict[str, int] = {
    "begin": 8, "begin_member": 4, "send": 14, "prepare": 8, "commit": 8, "rollback": 3, "transact": 8,
    "commit_group": 4, "abort_group": 1, "lose_session": 1, "work": 30, "wait": 6, "force": 5, "trouble": 3,
    "resume": 4, "disk_trouble": 2, "crash": 1, "check_all": 1,
}  # fmt: skip
"""What happens in a walk, and how often."""


class Interleavings(RuleBasedStateMachine):
    life: Life

    @initialize(seed=st.integers(0, 1 << 32))
    def begin_life(self, seed: int) -> None:
        self.life = Life(seed)

    @precondition(lambda self: len(self.life.live()) < OPEN_MAX)
    @rule(local=st.booleans(), turn=st.booleans())
    def begin(self, local: bool, turn: bool) -> None:
        self.life.begin(local, turn)

    @precondition(lambda self: len(self.life.live()) < OPEN_MAX)
    @rule(ahead=st.integers(0, 1), run=st.sampled_from(("r1", "r2")))
    def begin_member(self, ahead: int, run: str) -> None:
        self.life.begin_member(ahead, run)

    @rule(turn=st.booleans())
    def send(self, turn: bool) -> None:
        self.life.send(turn)

    @rule(turn=st.booleans())
    def prepare(self, turn: bool) -> None:
        self.life.prepare(turn)

    @rule(turn=st.booleans(), one_phase=st.booleans(), by_hand=st.booleans())
    def commit(self, turn: bool, one_phase: bool, by_hand: bool) -> None:
        self.life.commit(turn, one_phase, by_hand)

    @rule(turn=st.booleans(), by_hand=st.booleans())
    def rollback(self, turn: bool, by_hand: bool) -> None:
        self.life.rollback(turn, by_hand)

    @rule(turn=st.booleans(), offsets=st.booleans())
    def transact(self, turn: bool, offsets: bool) -> None:
        self.life.transact(turn, offsets)

    @rule(turn=st.booleans())
    def commit_group(self, turn: bool) -> None:
        self.life.commit_group(turn)

    @rule(run=st.sampled_from(("r1", "r2")))
    def abort_group(self, run: str) -> None:
        self.life.abort_group(run)

    @rule(index=st.integers(0, 5))
    def work(self, index: int) -> None:
        self.life.work(index)

    @rule(seconds=st.sampled_from((0.01, 1.0, 30.0)))
    def wait(self, seconds: float) -> None:
        self.life.wait(seconds)

    @rule(key=st.sampled_from(KEYS))
    def force(self, key: int) -> None:
        self.life.force(key)

    @rule(key=st.sampled_from(KEYS), full=st.booleans())
    def trouble(self, key: int, full: bool) -> None:
        self.life.trouble(key, full)

    @rule(key=st.sampled_from(KEYS))
    def resume(self, key: int) -> None:
        self.life.resume(key)

    @rule(chance=st.integers(0, 9))
    def delete_topic(self, chance: int) -> None:
        if not chance:
            self.life.delete_topic()

    @rule(kind=st.sampled_from(("write", "force")), nth=st.integers(1, 4))
    def disk_trouble(self, kind: str, nth: int) -> None:
        self.life.disk_trouble(kind, nth)

    @rule(power=st.booleans())
    def crash(self, power: bool) -> None:
        self.life.crash(power)

    @invariant()
    def answers_are_good(self) -> None:
        if hasattr(self, "life"):
            self.life.answers_are_good()

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.check_all()


TestInterleavings: Any = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=scaled(300), stateful_step_count=60, deadline=None)


@pytest.mark.long
@pytest.mark.parametrize("number", range(scaled(300)))
def test_a_long_walk(number: int) -> None:
    """Many more steps than hypothesis takes, each as often as it is in a busy broker with a bad disk."""
    generator = seeded("walk", number)
    life = Life(generator.randrange(1 << 32))
    steps: list[str] = []
    try:
        for _ in range(STEPS):
            step = walk(life, generator)
            steps.append(step)
            life.answers_are_good()
        life.check_all()
    except BaseException:
        print(f"seed {SEED}, walk {number}, after {len(steps)} steps: {steps[-20:]}")
        raise


def walk(life: Life, generator: Any) -> str:
    """One step; its name."""
    step: str = generator.choices(list(WALK), list(WALK.values()))[0]
    coin, other = generator.random() < 0.5, generator.random() < 0.3
    arguments: dict[str, tuple[Any, ...]] = {
        "begin": (coin, other),
        "begin_member": (generator.randrange(2), generator.choice(("r1", "r2"))),
        "send": (coin,),
        "prepare": (coin,),
        "commit": (coin, generator.random() < 0.7, other),
        "rollback": (coin, other),
        "transact": (coin, other),
        "commit_group": (coin,),
        "abort_group": (generator.choice(("r1", "r2")),),
        "work": (generator.randrange(6),),
        "wait": (generator.choice((0.01, 0.01, 1.0, 30.0)),),
        "force": (generator.choice(KEYS),),
        "trouble": (generator.choice(KEYS), coin),
        "resume": (generator.choice(KEYS),),
        "disk_trouble": ("write" if other else "force", generator.randint(1, 4)),
        "crash": (coin,),
    }
    if not (step.startswith("begin") and len(life.live()) >= OPEN_MAX):
        getattr(life, step)(*arguments.get(step, ()))
    return step
