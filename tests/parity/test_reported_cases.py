"""Public reports of mismatch, where no other test shows the whole of one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import patchkit  # noqa: E402
from patchkit.parity.oracle import SelectedLogprobs, three_way  # noqa: E402
from patchkit_adapters.qwen3_moe.tiny import SHAPE  # noqa: E402

pytestmark = pytest.mark.stack


@pytest.fixture
def installed() -> Iterator[Any]:
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    with patchkit.install(adapter="qwen3_moe", side="trainer", profile="cpu_tree") as installation:
        yield installation


# -- recomputed routing with exact ties --------------------------------------------------------


def tied_model(checkpointing: str) -> Any:
    """Experts 1 and 5, and 2 and 6, have one router row each between them: exact ties."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    config = Qwen3MoeConfig(**SHAPE, attn_implementation="sdpa")
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16).train()
    with torch.no_grad():
        for layer in model.model.layers:
            gate = layer.mlp.gate.weight
            gate[5], gate[6] = gate[1], gate[2]
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        if checkpointing == "reentrant":
            model.enable_input_require_grads()
    return model


def step(model: Any, *, thread: bool) -> tuple[list[Any], dict[str, Any]]:
    """Experts that each call of a router chose, and the gradients."""
    chosen: list[Any] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(
            lambda module, args, output: chosen.append(output[2].clone())
        )
    ids = torch.arange(3, 67)[None]
    with patchkit.exact_context():
        out = model(input_ids=ids, use_cache=False).logits
        loss = out.log_softmax(-1).gather(-1, ids[..., None]).mean()
    if thread:
        worker = threading.Thread(target=loss.backward)
        worker.start()
        worker.join()
    else:
        loss.backward()
    return chosen, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", ["reentrant", "non_reentrant"])
@pytest.mark.parametrize("thread", [False, True])
def test_exact_ties_choose_the_same_experts_in_the_recompute(
    installed: Any, checkpointing: str, thread: bool
) -> None:
    plain_choice, plain = step(tied_model(""), thread=False)
    choice, gradients = step(tied_model(checkpointing), thread=thread)
    layers = len(plain_choice)
    assert len(choice) == 2 * layers, "each router ran again in the backward pass"
    forward, recompute = choice[:layers], choice[layers:]
    for number, first in enumerate(forward):
        # The recompute runs from the last layer to the first.
        assert torch.equal(first, recompute[layers - 1 - number])
        assert torch.equal(first, plain_choice[number])
        # Where a tied pair was cut, the lower expert is in.
        for higher, lower in ((5, 1), (6, 2)):
            has_higher = (first == higher).any(-1)
            assert ((first == lower).any(-1) | ~has_higher).all()
    together = torch.cat(forward)
    cut = sum(
        int((((together == low).any(-1)) & ~((together == high).any(-1))).sum())
        for high, low in ((5, 1), (6, 2))
    )
    assert cut > 0, "no tie was cut: the test would show nothing"
    assert gradients.keys() == plain.keys()
    for name, gradient in plain.items():
        assert torch.equal(gradients[name], gradient), name


# -- text is no way to compare tokens --------------------------------------------------------------


class Tokenizer:
    """As real ones: what was sampled in two pieces comes back from its text as one."""

    PIECES = ("a", "b", "ab", "c")

    def decode(self, ids: list[int]) -> str:
        return "".join(self.PIECES[i] for i in ids)

    def encode(self, text: str) -> list[int]:
        found = []
        while text:
            piece = max((p for p in self.PIECES if text.startswith(p)), key=len)
            found.append(self.PIECES.index(piece))
            text = text[len(piece) :]
        return found


def selected(ids: list[int]) -> SelectedLogprobs:
    return SelectedLogprobs(
        logprobs=torch.full((len(ids),), -1.0),
        sequences=torch.zeros(len(ids), dtype=torch.int64),
        positions=torch.arange(4, 4 + len(ids)),
        token_ids=torch.tensor(ids),
    )


@pytest.mark.parametrize(
    ("sampled", "subject"),
    [([3, 0, 1, 3], "different tokens are compared"), ([0, 1, 2], "token_ids"), ([3, 2], None)],
    ids=["fewer tokens", "as many, but others", "the same"],
)
def test_a_replay_of_retokenised_text_is_refused(sampled: list[int], subject: str | None) -> None:
    """Equal log-probabilities of other tokens are no agreement."""
    text = Tokenizer()
    again = text.encode(text.decode(sampled))
    assert text.decode(again) == text.decode(sampled)
    if subject == "token_ids":
        again = [*again, 3]  # padded to the same length: only the ids can tell
    judged = three_way(
        selected(sampled),
        selected(again),
        selected(sampled),
        trainer_version=3,
        start_versions=3,
        end_versions=3,
    )
    if subject is None:
        assert judged.exact
    else:
        assert not judged.exact
        assert any(subject in str(v) for v in judged.violations), judged.violations
