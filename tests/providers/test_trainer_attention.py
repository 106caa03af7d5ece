"""The trainer's attention: every form of mask, packing, and the rollout's paged cache."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import Qwen3MoeConfig  # noqa: E402
from transformers.masking_utils import create_causal_mask  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention  # noqa: E402

from patchkit import providers  # noqa: E402
from patchkit.bindings.claim import UncoveredLayerError  # noqa: E402
from patchkit.bindings.transformers import attention_layer as trainer  # noqa: E402
from patchkit.bindings.transformers.norm_layer import rms_norm_forward  # noqa: E402
from patchkit.parity.conformance import PagedOperator, block_mask, causal_mask, examine  # noqa: E402
from patchkit_adapters.qwen3_moe.operators import TINY, Operators  # noqa: E402

pytestmark = pytest.mark.stack


def config(implementation: str) -> Qwen3MoeConfig:
    made = Qwen3MoeConfig(
        vocab_size=512, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_hidden_layers=1, max_position_embeddings=2048, num_experts=8, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    made._attn_implementation = implementation
    return made


@pytest.fixture(scope="module")
def layer() -> Qwen3MoeAttention:
    torch.manual_seed(3)
    made = Qwen3MoeAttention(config("sdpa"), layer_idx=0).to(torch.bfloat16)
    for module in (made.q_norm, made.k_norm):
        # The norm is patched as well; here it is called as the patched forward would be.
        module.forward = lambda x, norm=module: rms_norm_forward(norm, x)
        with torch.no_grad():
            module.weight.copy_(1.0 + 0.2 * torch.randn(32))
    return made


@pytest.fixture(scope="module")
def hidden() -> torch.Tensor:
    return torch.randn(1, 40, 128, generator=torch.Generator().manual_seed(4)).bfloat16()


def forward(layer, hidden, mask, positions, implementation="sdpa"):
    layer.config._attn_implementation = implementation
    with torch.no_grad():
        return trainer.attention_forward(layer, hidden, (None, None), mask, position_ids=positions)[
            0
        ]


def alone(layer, hidden):
    return forward(layer, hidden, None, torch.arange(hidden.shape[1])[None])


def padded(layer, hidden, real_BS):
    """Sequences placed where ``real`` is 1, with noise in the padding; their position ids."""
    batch, length = real_BS.shape
    x = torch.full((batch, length, 128), 50.0, dtype=hidden.dtype)
    for row, real in enumerate(real_BS.bool()):
        x[row, real] = hidden[0, : int(real.sum())]
    return x, (real_BS.cumsum(-1) - 1).clamp_min(0)


RIGHT = torch.tensor([[1] * 40, [1] * 7 + [0] * 33, [1] + [0] * 39])
LEFT = RIGHT.flip(-1)


def transformers_mask(implementation, x, real_BS, positions):
    return create_causal_mask(
        config=config(implementation), inputs_embeds=x, attention_mask=real_BS,
        past_key_values=None, position_ids=positions,
    )  # fmt: skip


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flash_attention_2"])
@pytest.mark.parametrize("real_BS", [RIGHT, LEFT], ids=["right padding", "left padding"])
def test_padded_rows_equal_each_sequence_alone(layer, hidden, implementation, real_BS):
    x, positions = padded(layer, hidden, real_BS)
    mask = transformers_mask(implementation, x, real_BS, positions)
    form = {"sdpa": torch.bool, "eager": torch.bfloat16}.get(implementation)
    if form:
        assert mask.dim() == 4
        assert mask.dtype in (form, torch.float32)
    else:
        assert mask.dim() == 2
    found = forward(layer, x, mask, positions, implementation)
    for row, real in enumerate(real_BS.bool()):
        assert torch.equal(found[row, real], alone(layer, hidden[:, : int(real.sum())])[0])


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flash_attention_2"])
@pytest.mark.parametrize("lengths", [[40], [7, 33], [1, 1, 2, 17, 3]], ids=str)
def test_packed_sequences_equal_each_alone(layer, hidden, implementation, lengths):
    x = torch.cat([hidden[:, :n] for n in lengths], dim=1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    mask = transformers_mask(implementation, x, None, positions)
    found = forward(layer, x, mask, positions, implementation)
    expected = torch.cat([alone(layer, hidden[:, :n]) for n in lengths], dim=1)
    assert torch.equal(found, expected)


def test_a_longer_prompt_does_not_change_its_beginning(layer, hidden):
    whole = alone(layer, hidden)
    for length in (1, 2, 3, 7, 31, 32, 33):
        assert torch.equal(alone(layer, hidden[:, :length]), whole[:, :length])


# --- allowed_positions, form by form ------------------------------------------------

IDS = torch.arange(4)[None]
CAUSAL = causal_mask(4, 4)
PACKED = torch.tensor([[0, 1, 0, 1]])
PADDING = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
LOWEST = torch.finfo(torch.float32).min


def additive(allowed: torch.Tensor, dtype=torch.float32) -> torch.Tensor:
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


@pytest.mark.parametrize(
    ("mask", "positions", "batch", "expected"),
    [
        pytest.param(None, IDS, 1, CAUSAL[None], id="none: causal"),
        pytest.param(None, IDS, 3, CAUSAL.expand(3, 4, 4), id="none, a batch of 3"),
        pytest.param(None, PACKED, 1, block_mask(PACKED[0])[None], id="none, packed"),
        pytest.param(torch.ones(1, 4), IDS, 1, CAUSAL[None], id="[B, S] ones"),
        pytest.param(PADDING, IDS, 2, CAUSAL & PADDING.bool()[:, None], id="[B, S] padding"),
        pytest.param(CAUSAL[None, None], IDS, 1, CAUSAL[None], id="[1, 1, S, S] bool"),
        pytest.param(
            CAUSAL[None, None], IDS, 2, CAUSAL.expand(2, 4, 4), id="[1, 1, S, S] bool for 2"
        ),
        pytest.param(
            block_mask(PACKED[0])[None, None], PACKED, 1, block_mask(PACKED[0])[None],
            id="[B, 1, S, S] bool, packed",
        ),
        pytest.param(additive(CAUSAL)[None, None], IDS, 1, CAUSAL[None], id="additive float32"),
        pytest.param(
            additive(CAUSAL, torch.bfloat16)[None, None], IDS, 1, CAUSAL[None], id="additive bf16"
        ),
        pytest.param(
            torch.zeros(1, 1, 4, 4).masked_fill(~CAUSAL, -torch.inf), IDS, 1, CAUSAL[None],
            id="additive, -inf",
        ),
    ],
)  # fmt: skip
def test_allowed_positions(mask, positions, batch, expected):
    found = trainer.allowed_positions(mask, positions, batch, "sdpa")
    assert found.dtype == torch.bool
    assert torch.equal(found, expected)


def block_mask_of_flex_attention():
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 128, 128, device="cpu")


@pytest.mark.parametrize(
    ("mask", "implementation", "named"),
    [
        (block_mask_of_flex_attention, "flex_attention", ["BlockMask", "'flex_attention'"]),
        (lambda: torch.ones(1, 4, 4, 4, dtype=torch.bool), "sdpa", ["Tensor[1, 4, 4, 4]"]),
        (lambda: torch.ones(1, 1, 4, 9, dtype=torch.bool), "sdpa", ["Tensor[1, 1, 4, 9]"]),
        (lambda: torch.ones(4, 4, 4), "eager", ["Tensor[4, 4, 4]", "'eager'"]),
        # 0 and 1 in an integer: read as additive, everything would be allowed.
        (lambda: torch.ones(1, 1, 4, 4, dtype=torch.long), "sdpa", ["torch.int64"]),
        (lambda: torch.ones(1, 9), "flash_attention_2", ["Tensor[1, 9]"]),
        (lambda: torch.ones(3, 4), "flash_attention_2", ["Tensor[3, 4]"]),
        # A bias on the scores, not a mask.
        (lambda: -torch.ones(1, 1, 4, 4), "eager", ["Tensor[1, 1, 4, 4]", "0 and lowest"]),
        (lambda: "causal", "paged|sdpa", ["str", "paged|sdpa"]),
    ],
)
def test_other_masks_are_refused_by_name(mask, implementation, named):
    with pytest.raises(UncoveredLayerError, match="Qwen3MoeAttention") as caught:
        trainer.allowed_positions(mask(), IDS, 1, implementation, "Qwen3MoeAttention")
    for text in named:
        assert re.search(re.escape(text), str(caught.value)), (text, str(caught.value))


@pytest.mark.parametrize(
    ("forward", "change", "named"),
    [
        ("attention_forward", {"cache": object()}, "cache.*use_cache=False"),
        ("attention_forward", {"past_key_values": object()}, "cache.*use_cache=False"),
        ("attention_forward_5_17", {"past_key_values": object()}, "past_key_values.*use_cache"),
        ("attention_forward", {"position_ids": None}, "absolute positions"),
        ("attention_forward_5_17", {"position_ids": None}, "absolute positions"),
    ],
)
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_calls_outside_the_claim_are_refused(layer, hidden, forward, change, named):
    arguments = {"position_ids": torch.arange(40)[None], **change}
    with pytest.raises(UncoveredLayerError, match=named):
        getattr(trainer, forward)(layer, hidden, (None, None), None, **arguments)


# --- rollout and trainer -----------------------------------------------------------


def test_the_paged_cache_equals_the_trainers_attention():
    """The same requests: pages, chunks and decodes on one side, one packed row on the other."""
    paged = Operators(shape=TINY, row_counts=(1,)).paged_attention((33, 1, 7, 65))
    positions = torch.cat([torch.arange(len(q)) for q in paged.query])[None]
    query, key, value = (torch.cat(x)[None] for x in (paged.query, paged.key, paged.value))
    allowed = trainer.allowed_positions(None, positions, 1, "sdpa")
    packed = providers.attention(query, key, value, allowed, scale=TINY.head_size**-0.5)[0]
    assert torch.equal(packed, paged.expected)
    examine(paged).raise_if_failed()


@pytest.mark.parametrize("tokens", [1, 5])
def test_padded_and_empty_requests_of_a_step_are_left_alone(tokens):
    """vLLM pads a step: slots of -1, requests without tokens, rows beyond the last request."""
    from types import SimpleNamespace

    from patchkit.bindings.vllm_cpu import attention as rollout

    operator = Operators(shape=TINY, row_counts=(1,)).paged_attention((tokens,))
    layer = SimpleNamespace(
        scale=TINY.head_size**-0.5, attn_type="decoder", sliding_window=-1, logits_soft_cap=0,
        alibi_slopes=None, sinks=None, is_fp8_kv_cache=False,
    )  # fmt: skip
    cache = operator.cache(4, 16).fill_(torch.nan)
    padding = 3
    wide = [
        torch.cat([x[0], x[0].new_full((padding, *x[0].shape[1:]), torch.nan)])
        for x in (operator.query, operator.key, operator.value)
    ]
    slots = torch.cat([torch.arange(tokens) + 32, torch.full((padding,), -1)])
    rollout.kv_cache_update(layer, None, wide[1], wide[2], cache, slots)
    assert cache[[0, 1, 3]].isnan().all()
    assert cache[2, :, tokens:].isnan().all()
    metadata = SimpleNamespace(
        causal=True,
        query_start_loc=torch.tensor([0, tokens, tokens], dtype=torch.int32),
        seq_lens=torch.tensor([tokens, 0], dtype=torch.int32),
        block_table=torch.tensor([[2], [0]], dtype=torch.int32),
    )
    output = torch.full_like(wide[0], 7.0)
    rollout.attention_forward(layer, None, wide[0], None, None, cache, metadata, output)
    assert torch.equal(output[:tokens], operator.expected)
    assert bool((output[tokens:] == 7.0).all())


def test_a_rollout_that_reads_another_slot_is_noticed():
    operator = Operators(shape=TINY, row_counts=(1,)).paged_attention((33, 5))

    def off_by_one(cache, key, value, slots):
        operator.write(cache, key, value, slots ^ 1)

    wrong = PagedOperator(
        **{name: getattr(operator, name) for name in PagedOperator.__dataclass_fields__}
        | {"write": off_by_one}
    )
    assert not examine(wrong).passed
