"""What both models write: greedy continuations of the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from regraft.eval.results import Sample

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences what a hash table is.",
    "Write a short Python function that reverses a string.",
)


def prompt_ids(tokenizer: Any, prompt: str) -> torch.Tensor:
    """Ids [1, T] of a prompt: through the chat template if the tokenizer has one, as plain text otherwise."""
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
    return tokenizer(prompt, return_tensors="pt")["input_ids"]


def continue_greedily(model: Any, tokenizer: Any, prompt: str, new_tokens: int) -> str:
    """The model's greedy answer to `prompt`, at most `new_tokens` tokens."""
    ids = prompt_ids(tokenizer, prompt).to(model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def samples(
    teacher: Any, student: Any, tokenizer: Any, prompts: Sequence[str] = PROMPTS, new_tokens: int = 48
) -> list[Sample]:
    """Continuations of every prompt by both models."""
    return [
        Sample(
            prompt,
            continue_greedily(teacher, tokenizer, prompt, new_tokens),
            continue_greedily(student, tokenizer, prompt, new_tokens),
        )
        for prompt in prompts
    ]
