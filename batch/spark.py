"""A pandas UDF for Spark: a column of texts to a column of answers, by an engine in each Python worker."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd

from batch.answers import plain
from batch.predictor import Model, Predictor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def spark_udf(**model: Any) -> Any:  # noqa: ANN401  Spark has no types
    """Makes a UDF that turns a column of texts into one of answers.

    A row that is rejected has null. Every worker needs the model repository at the same path. An engine takes the CPUs
    that a worker may use, unless `threads` says how many: set it to `spark.task.cpus`.

    Args:
        **model: As `batch.predictor.Model` takes them.

    Raises:
        BatchError: They are wrong, or the models must not be served.
    """
    from pyspark.sql.functions import pandas_udf  # noqa: PLC0415  an optional library
    from pyspark.sql.pandas.types import from_arrow_type  # noqa: PLC0415  likewise
    from pyspark.sql.types import ArrayType, FloatType  # noqa: PLC0415  likewise

    column = Model(**model).column
    vectors = ArrayType(FloatType())
    kinds = {"embedding": vectors, "embeddings": ArrayType(vectors)}
    answer = answers_of(**model)

    def answers(texts: Iterator[pd.Series]) -> Iterator[pd.Series]:
        return answer(texts)

    return pandas_udf(answers, kinds.get(column.name) or from_arrow_type(column.type))


def answers_of(**model: Any) -> Callable[[Iterator[pd.Series]], Iterator[pd.Series]]:  # noqa: ANN401  those of `Model`
    """The UDF without Spark: series of texts to series of answers, null where a row is rejected."""
    told = msgspec.json.encode(model, enc_hook=str)

    def answers(texts: Iterator[pd.Series]) -> Iterator[pd.Series]:
        predictor = _predictor(told)
        for series in texts:
            values = [None if pd.isna(value) else value for value in series]
            yield pd.Series(
                [None if each.reason else _listed(each.answer) for each in predictor.predict(values)], dtype=object
            )

    return answers


@cache
def _predictor(told: bytes) -> Predictor:
    """One for all partitions that a worker computes."""
    return Predictor(Model(**msgspec.json.decode(told)))


def _listed(answer: Any) -> Any:  # noqa: ANN401  any task's answer
    """As Spark takes it: a matrix as a list of its rows."""
    return list(answer) if getattr(answer, "ndim", 1) > 1 else plain(answer)
