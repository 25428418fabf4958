"""What must hold of every job after a chaos run; each breach names its job."""

import json
from collections import defaultdict
from typing import Any

from chaos_journal import Line
from chaos_plan import make_job
from chaos_streams import Output, Text, append, output_of_stream
from chaos_truth import TERMINAL, JobTruth, Truth

ISOLATE_AFTER = 2
"""Default of scheduler.isolate_after_losses: nothing is given up before."""


def output_of_log(job: JobTruth) -> Output:
    """Joins the log in Redis; the end must stand last, offsets must follow.

    Raises:
        ValueError: They do not.
    """
    found: Output = {}
    ended = False
    for entry, delta in job.log:
        if ended:
            raise ValueError(f"the log goes on after the end at {entry}")
        if delta is None:
            continue
        ended = "end" in delta
        if delta.get("token_ids") or delta.get("text") or delta.get("finish_reason"):
            one = (
                *(delta.get("choice", 0), delta.get("offset", 0)),
                *(tuple(delta.get("token_ids", ())), delta.get("text", "")),
                delta.get("finish_reason"),
            )
            append(found, one)
    if job.log and not ended:
        raise ValueError("the log has no end")
    return found


def output_of_result(result: dict[str, Any]) -> Output:
    """The same for a recorded result."""
    return {
        choice["index"]: Text(
            choice["token_ids"], choice["text"], choice["finish_reason"]
        )
        for choice in result.get("choices", ())
    }


class Checker:
    """Compares what Redis, the subscribers and the reference say.

    Args:
        truth: Everything that was read.
        seed: Of the run.
        jobs: How many were to be submitted.
        reference: By variant, the result of an undisturbed run.
    """

    def __init__(
        self, truth: Truth, seed: int, jobs: int, reference: dict[int, dict[str, Any]]
    ) -> None:
        self._truth = truth
        self._seed = seed
        self._jobs = jobs
        self._reference = reference
        self.breaches: list[str] = list(truth.errors)
        self.states: dict[str, int] = defaultdict(int)

    def run(self) -> None:
        """Checks everything."""
        known: set[str] = set()
        for number in range(self._jobs):
            ids = self._truth.submitted.get(number, set())
            known |= ids
            if len(ids) != 1:
                self._say(number, f"was enqueued as {sorted(ids) or 'nothing'}")
                continue
            (job_id,) = ids
            job = self._truth.jobs.get(job_id)
            if job is None:
                self._say(number, f"{job_id} is gone from Redis")
                continue
            try:
                self._check(number, job_id, job)
            except ValueError as error:
                self._say(number, f"{job_id}: {error}")
        strangers = self._truth.jobs.keys() - known
        self.breaches += [f"nobody submitted {job_id}" for job_id in strangers]

    def _say(self, number: int, what: str) -> None:
        self.breaches.append(f"job {number}: {what}")

    def _check(self, number: int, job_id: str, job: JobTruth) -> None:
        state = job.record.get("state", "none")
        self.states[state] += 1
        if state not in TERMINAL:
            raise ValueError(f"is still {state}: {job.record}")
        if self._truth.ends.get(job_id, []) != [state]:
            raise ValueError(f"is {state}, events: {self._truth.ends.get(job_id)}")
        if job.result is None or job.result["state"] != state:
            raise ValueError(f"is {state}, its result says {job.result}")
        self._check_state(number, state, job)
        logged = output_of_log(job)
        recorded = output_of_result(job.result)
        if recorded:
            _same("log", logged, "result", recorded, reasons=state == "succeeded")
        self._check_reference(number, state, recorded or logged, job.result)
        for which in make_job(self._seed, number).streamers:
            lines = self._truth.streams.get((which, number), [])
            self._check_stream(which, lines, state, recorded or logged)

    def _check_state(self, number: int, state: str, job: JobTruth) -> None:
        plan, error = make_job(self._seed, number), (job.result or {}).get("error")
        if state == "cancelled" and plan.cancel_s is None:
            raise ValueError("is cancelled, and nobody asked for that")
        if state == "expired" and plan.deadline_s is None:
            raise ValueError("is expired and had no deadline")
        losses = int(job.record.get("lease_losses") or 0)
        given_up = (error or {}).get("code") == "lease_lost"
        if state == "failed" and not (given_up and losses > ISOLATE_AFTER):
            raise ValueError(f"failed after {losses} lost leases: {error}")
        if int(job.record.get("attempts") or 0):
            raise ValueError(f"was charged an attempt: {job.record.get('last_error')}")

    def _check_reference(
        self, number: int, state: str, found: Output, result: dict[str, Any]
    ) -> None:
        expected = self._reference[make_job(self._seed, number).variant]
        whole = output_of_result(expected)
        if state == "succeeded":
            _same("result", found, "undisturbed run", whole, reasons=True)
            for ours, theirs in zip(
                result["choices"], expected["choices"], strict=True
            ):
                if ours.get("logprobs") != theirs.get("logprobs"):
                    raise ValueError("log probabilities differ from the undisturbed")
        for choice, one in found.items():
            ids = whole[choice].ids[: len(one.ids)]
            if one.ids != ids or not whole[choice].text.startswith(one.text):
                raise ValueError(f"choice {choice} departs from the undisturbed run")

    def _check_stream(
        self, which: int, lines: list[Line], state: str, found: Output
    ) -> None:
        name = f"subscriber {which}"
        try:
            seen = output_of_stream(lines)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        _same(name, seen, "result", found, reasons=state == "succeeded")
        ends = [line for line in lines if "end" in line]
        if [line["end"] for line in ends] != [state]:
            raise ValueError(f"{name} saw the ends {ends}, and it is {state}")
        if state == "succeeded":
            texts = [found[choice].text for choice in sorted(found)]
            if ends[0]["texts"] != texts:
                raise ValueError(f"{name} was given another result: {ends[0]}")
        elif state != "failed" and ends[0]["result"] != state:
            raise ValueError(f"{name} was told {ends[0]['result']}, and it is {state}")


def _same(
    name: str, one: Output, other_name: str, other: Output, *, reasons: bool
) -> None:
    for choice in one.keys() | other.keys():
        a, b = one.get(choice, Text([], "")), other.get(choice, Text([], ""))
        for what, x, y in (
            ("tokens", a.ids, b.ids),
            ("text", a.text, b.text),
            ("finish reason", reasons and a.reason, reasons and b.reason),
        ):
            if x != y:
                raise ValueError(
                    f"choice {choice}: {what} of {name} and {other_name} differ: "
                    f"{json.dumps(x)[-200:]} and {json.dumps(y)[-200:]}"
                )
