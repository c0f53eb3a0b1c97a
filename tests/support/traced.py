"""Modules of PyTorch that tests trace. They are apart from their users, as importing them loads PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import transformers


class Outputs(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return tuple(value for value in outputs.values() if isinstance(value, torch.Tensor))


class Fills(torch.nn.Module):
    """A BERT that fills masks: its head runs at their places alone."""

    def __init__(self, model: transformers.BertForMaskedLM) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, mask_positions: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        hidden = self.model.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        index = mask_positions.to(torch.int64).unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        logits = self.model.cls(hidden.gather(1, index))
        best, ids = torch.topk(logits, 5)
        return ids.to(torch.int32), best, torch.logsumexp(logits, -1)


class TaskOutputs(torch.nn.Module):
    """The outputs that manifests promise of a model of a task."""

    def __init__(self, model: torch.nn.Module, task: str, candidates: int) -> None:
        super().__init__()
        self.model = model
        self.task = task
        self.candidates = candidates

    def forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        types: torch.Tensor,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        answer = self.model(input_ids=ids, attention_mask=mask, token_type_ids=types)
        if self.task == "embed":
            return (answer.last_hidden_state[:, 0],)
        if self.task == "embed_tokens":
            return (answer.last_hidden_state,)
        if self.task == "answer":
            return answer.start_logits, answer.end_logits
        if self.task == "embed_sparse":
            weights = torch.log1p(torch.relu(answer.logits * mask.unsqueeze(-1)).amax(1)).topk(self.candidates)
            # As below: manifests say how many `topk` gives.
            return tuple(
                part.reshape(ids.shape[0], self.candidates) for part in (weights.indices.int(), weights.values)
            )
        if positions is None:
            return (answer.logits,)
        wanted = positions.long().unsqueeze(-1).expand(-1, -1, answer.logits.shape[-1])
        logits = answer.logits.gather(1, wanted)
        best = logits.topk(self.candidates, dim=-1)
        # The exporter forgets how many `topk` gives; manifests say it.
        ids, values = (part.reshape(*positions.shape, self.candidates) for part in (best.indices.int(), best.values))
        return ids, values, logits.logsumexp(-1)
