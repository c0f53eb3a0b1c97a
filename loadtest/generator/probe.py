"""Probes a server: whether it is reachable, answers the scenario's requests, and how it counts tokens."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Self

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.answers import Answers
from bertserve.loadtest.generator.closed_loop import Lane, connect
from bertserve.loadtest.generator.messages import messages
from bertserve.loadtest.generator.run import Kind
from bertserve.loadtest.generator.texts import inputs_in, read_texts, texts_for
from bertserve.loadtest.generator.workload import make_texts, sentence_words

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    from bertserve.loadtest.generator.messages import Target
    from bertserve.loadtest.generator.scenario import Scenario
    from bertserve.loadtest.generator.texts import Text
    from bertserve.loadtest.generator.wire import Reply

TEXTS = 16
"""Distinct texts per length, so that requests do not all hit the same entry of a server cache."""

_TRIES = 12
_TOKENS_PER_WORD = 1.35
_SPECIAL_TOKENS = 2


class Probe:
    """A connection that sends one request at a time; leaving its `with` block closes it."""

    def __init__(self, target: Target) -> None:
        """Connects.

        Raises:
            BenchError: The server refuses the connection.
        """
        self._target = target
        self._connection = connect(*target.address())
        self._wire = target.wire()
        self._lane = Lane(self._connection, self._wire, self._check)
        self._answers: dict[str, Answers] = {}
        self._words = sentence_words()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def kinds(self, scenario: Scenario, bundle: Path | None, file: Path | None = None) -> tuple[Kind, ...]:
        """The requests of a scenario: every task with every length.

        Args:
            scenario: Its tasks and lengths.
            bundle: Bundle that counts tokens; None: the server counts them.
            file: File with the texts of all tasks, whatever their lengths.

        Raises:
            BenchError: The server does not answer such requests, or texts of a length cannot be made.
        """
        tasks = scenario.tasks or {"embed": 1.0}
        if file is not None:
            return self._kinds_of(tasks, file)
        made = {tokens: self._texts(bundle, tokens, next(iter(tasks))) for tokens in scenario.lengths}
        kinds = []
        for task, share in tasks.items():
            for tokens, weight in scenario.lengths.items():
                self.tokens(task, made[tokens][0])
                name = f"{tokens} tokens" if len(tasks) == 1 else f"{task}, {tokens} tokens"
                kinds.append(Kind(name, task, share * weight, made[tokens]))
        return tuple(kinds)

    def tokens(self, task: str, text: Text) -> int:
        """Sends one request; returns the token count that the server reports, -1 if it reports none.

        Raises:
            BenchError: The request failed, or the answer is invalid.
        """
        [message] = messages(self._target, task, [text])
        reply = self._lane.exchange(message)
        answers = self._answers.setdefault(task, Answers(self._target.protocol, task))
        if fault := answers.fault(reply, inputs_in(task, text)):
            raise BenchError(f"{self._target.authority} returned {fault}: {_shown(reply)}")
        return self._wire.served(reply.head).tokens

    def _kinds_of(self, tasks: Mapping[str, float], file: Path) -> tuple[Kind, ...]:
        texts = read_texts(file)
        kinds = []
        for task, share in tasks.items():
            name = file.name if len(tasks) == 1 else f"{task}, {file.name}"
            own = texts_for(task, file, texts)
            asked = own[:: -(-len(own) // TEXTS)]
            tokens = [self.tokens(task, text) for text in asked]
            lengths = f"{min(tokens)} to {max(tokens)} tokens in {len(asked)} of {len(own)} texts"
            kinds.append(Kind(name, task, share, own, lengths if min(tokens) >= 0 else ""))
        return tuple(kinds)

    def _texts(self, bundle: Path | None, tokens: int, task: str) -> tuple[str, ...]:
        if bundle is not None:
            return tuple(text.text for text in make_texts(bundle, tokens, TEXTS))
        dice = random.Random(tokens)
        return tuple(self._fitted(dice.randrange(len(self._words)), tokens, task) for _ in range(TEXTS))

    def _fitted(self, start: int, tokens: int, task: str) -> str:
        """A text with `tokens` tokens by the server's count, or as close as a few tries come.

        One word changes the count by one or a few tokens, so each try adjusts the number of words by the difference.
        """
        count = max(1, round((tokens - _SPECIAL_TOKENS) / _TOKENS_PER_WORD))
        best, least = "", tokens + 1
        for _ in range(_TRIES):
            text = " ".join(self._words[(start + index) % len(self._words)] for index in range(count))
            found = self.tokens(task, text)
            if found < 0:  # the server reports no count
                return text
            if abs(found - tokens) < least:
                best, least = text, abs(found - tokens)
            if found == tokens:
                break
            step = round((tokens - found) / _TOKENS_PER_WORD) or (1 if tokens > found else -1)
            count = max(1, count + step)
            start += count == 1  # a single word may be too long: tries another one
        return best

    def _check(self, reply: Reply) -> None:
        if reply.fault:
            raise BenchError(f"{self._target.authority} returned {reply.fault}: {_shown(reply)}")


def _shown(reply: Reply) -> str:
    return reply.body[:300].decode("utf-8", "replace").replace("\n", " ")
