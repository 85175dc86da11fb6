"""Random schedules: whatever is submitted, paused and cancelled when, each session says what it says alone."""

from __future__ import annotations

import random
import threading
import time

import pytest
from engine_queue.rig import Bench, alone, outcome_of, prompt, reply, until
from harness import SETUPS

from mlxgen.engine import Engine
from mlxgen.job import Job

NUM_SESSIONS = 8
# Of every kind of cache; most of the quickest.
SEEDS = {
    "llama": range(100),
    "lfm2": range(100, 150),
    "quantized": range(150, 180),
    "gemma3-window": range(180, 200),
}


class Schedule:
    """Acts in the middle of passes, where another thread's calls would land; the same for the same seed."""

    def __init__(self, seed: int, bench: Bench, engine: Engine) -> None:
        self.random = random.Random(seed)
        self.bench = bench
        self.engine = engine
        bench.passes.clear()
        self.lengths = [self.random.randint(2, 3) for _ in range(NUM_SESSIONS)]
        self.sessions = [self.bench.session(str(number)) for number in range(NUM_SESSIONS)]
        self.jobs: list[list[Job]] = [[] for _ in range(NUM_SESSIONS)]
        self.unasked = list(range(NUM_SESSIONS))
        self.paused: set[Job] = set()
        self.cancelled: set[Job] = set()
        self.num_switches = 0
        self.problems: list[str] = []
        self.checked_unit = -1

    def run(self) -> None:
        self.bench.on_pass = self.act
        self.submit()
        deadline = time.monotonic() + 60
        while self.unasked or any(not job.done for jobs in self.jobs for job in jobs):
            assert time.monotonic() < deadline, "a job is stuck"
            num_units = self.bench.num_units
            live = [jobs[-1] for jobs in self.jobs if jobs and not jobs[-1].done]
            at_rest = all(job.state == "paused" for job in live)
            if (
                at_rest and self.bench.num_units == num_units
            ):  # then nothing moves any more unless it is moved from here
                if live:
                    self.resume(live[0])
                elif self.unasked:
                    self.submit()
            time.sleep(0.002)
        self.bench.on_pass = None
        for number, session in enumerate(self.sessions):
            if session.unfinished:
                self.jobs[number].append(self.engine.submit(session))
        for jobs in self.jobs:
            assert jobs[-1].result(60).finish_reason == "length"

    # -- in the middle of a pass, on the model's thread ------------------------------------------------------------

    def act(self) -> None:
        self.check_order()
        dice = self.random.random()
        live = [jobs[-1] for jobs in self.jobs if jobs and not jobs[-1].done]
        if dice < 0.4 and self.unasked:
            self.submit()
        elif dice < 0.6:
            running = [job for job in live if job.session.name == self.bench.current[0]]
            self.pause(self.random.choice([*running, self.random.choice(live)]))
        elif dice < 0.8 and self.paused:
            self.resume(self.random.choice(sorted(self.paused, key=lambda job: job.session.name)))
        elif dice < 0.85:
            job = self.random.choice(live)
            self.cancelled.add(job)
            job.cancel()
        else:
            self.submit_again()

    def submit(self) -> None:
        number = self.unasked.pop(0)
        urgency = self.random.choice([0, 1, number, 10 + number])
        job = self.engine.submit(
            self.sessions[number],
            prompt(number),
            priority=urgency,
            reply=reply(number, self.lengths[number]),
        )
        self.jobs[number].append(job)

    def submit_again(self) -> None:
        for number, jobs in enumerate(self.jobs):
            if jobs and jobs[-1].done and self.sessions[number].unfinished:
                jobs.append(self.engine.submit(self.sessions[number], priority=self.random.randint(0, 2)))
                return

    def pause(self, job: Job) -> None:
        self.paused.add(job)
        job.pause()

    def resume(self, job: Job) -> None:
        self.paused.discard(job)
        job.resume()

    def check_order(self) -> None:
        """Each unit is one of the most urgent job that could run when it began, the earliest among equals.

        What is called in the middle of one unit holds for the next: an urgent job's first unit is that one.
        """
        name, unit = self.bench.current
        if unit == self.checked_unit:
            return
        self.checked_unit = unit
        able = [
            jobs[-1]
            for jobs in self.jobs
            if jobs and not jobs[-1].done and jobs[-1] not in self.paused and jobs[-1] not in self.cancelled
        ]
        first = min(able, key=lambda job: job._run.place)
        if first.session.name != name:
            self.problems.append(f"unit {unit} is one of {name}, but it was the turn of {first.session.name}")
        if len(self.bench.passes) > 1 and self.bench.passes[-2][0] != name:
            self.num_switches += 1


@pytest.mark.parametrize("kind", SEEDS)
def test_200_random_schedules_over_8_sessions(kind) -> None:
    bench, switches, seeds = Bench(kind), 0, SEEDS[kind]
    with Engine(bench.model) as engine:
        for seed in seeds:
            schedule = Schedule(seed, bench, engine)
            schedule.run()
            assert not schedule.problems, (seed, schedule.problems)
            switches += schedule.num_switches
            for number, jobs in enumerate(schedule.jobs):
                expected = alone(kind, number, schedule.lengths[number])
                assert outcome_of(*jobs).values == expected, (seed, number)
                assert schedule.sessions[number].reply_text == "".join(text for _, _, text, _, _ in expected)
    interruptions = switches - (NUM_SESSIONS - 1) * len(seeds)
    assert interruptions > 3 * len(seeds), "too few of the schedules' calls interrupt somebody"


@pytest.mark.parametrize("seed", range(6))
def test_the_same_with_calls_from_other_threads_at_any_moment(seed) -> None:
    bench = Bench(list(SETUPS)[seed])
    lengths = [12] * NUM_SESSIONS
    sessions = [bench.session(str(number)) for number in range(NUM_SESSIONS)]
    jobs: list[list[Job]] = [[] for _ in sessions]
    with Engine(bench.model) as engine:
        for number, session in enumerate(sessions):
            jobs[number].append(engine.submit(session, prompt(number), reply=reply(number, 12), priority=number % 3))
        everything_done = threading.Event()

        def disturb(own: int) -> None:
            dice = random.Random(100 * seed + own)
            while not everything_done.is_set():
                number = dice.randrange(NUM_SESSIONS)
                job = jobs[number][-1]
                what = dice.random()
                if what < 0.4:
                    job.pause(wait=what < 0.2)
                    time.sleep(0.001 * dice.random())
                    job.resume()
                elif what < 0.5:
                    job.cancel()
                time.sleep(0.002 * dice.random())

        threads = [threading.Thread(target=disturb, args=(own,)) for own in range(3)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        while any(session.unfinished or not jobs[n][-1].done for n, session in enumerate(sessions)):
            assert time.monotonic() < deadline
            for number, session in enumerate(sessions):
                if jobs[number][-1].done and session.unfinished:
                    jobs[number].append(engine.submit(session, priority=number % 3))
            time.sleep(0.001)
        everything_done.set()
        for thread in threads:
            thread.join()
    for number in range(NUM_SESSIONS):
        assert outcome_of(*jobs[number]).values == alone(bench.setup, number, lengths[number])


def test_an_urgent_job_s_first_unit_is_the_next_one_wherever_the_running_one_is() -> None:
    """Submitted in the middle of each unit of a run, prefill chunks and tokens: nothing of the other comes between."""
    total = len(alone_passes())
    for at in range(1, total + 1):
        bench = Bench(step_size=16)
        with Engine(bench.model) as engine:
            calm, urgent = bench.session("calm"), bench.session("urgent")
            jobs: list[Job] = []

            def act(at=at, bench=bench, engine=engine, urgent=urgent, jobs=jobs) -> None:
                if len(bench.passes) == at:
                    jobs.append(engine.submit(urgent, prompt(1), priority=1, reply=reply(1, 2)))

            bench.on_pass = act
            first = engine.submit(calm, prompt(2), reply=reply(2, 6))
            assert first.result(60).finish_reason == "length"
            until(lambda jobs=jobs: jobs)
            assert jobs[0].result(60).finish_reason == "length"
        unit = bench.passes[at - 1][1]
        later = [name for name, number in bench.passes[at:] if number != unit]
        before = later[: later.index("urgent")]
        assert before == [], f"submitted in pass {at}"
        finished = max(index for index, name in enumerate(later) if name == "urgent")
        assert set(later[:finished]) == {"urgent"}, "it keeps the thread until it ends"
        assert outcome_of(first).values == alone("llama", 2, 6, 16)
        assert outcome_of(jobs[0]).values == alone("llama", 1, 2, 16)


def alone_passes() -> list[tuple[str, int]]:
    bench = Bench(step_size=16)
    for _ in bench.session("calm").stream(prompt(2), reply=reply(2, 6)):
        pass
    return bench.passes
