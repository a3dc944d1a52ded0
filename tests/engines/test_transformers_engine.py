"""One engine's life: what a request gets, what is refused, and what a fault may cost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from hicache import Namespace
from hicache.cache import HiCache
from hicache.config import device_budget
from hicache.engines.transformers import TransformersEngine
from hicache.engines.transformers_identity import weights_digest
from hicache.engines.transformers_library import OLDEST, load_library, release
from hicache.errors import ConfigError, EngineUnavailableError
from hicache.testing.model_oracle import ModelOracle, open_quiet, squeeze, tiny_settings
from hicache.testing.scripted_store import FLIPPED, MISS, SHORT, Raise, ScriptedStore
from hicache.testing.tiny_models import make_tiny_model
from hicache.types import Tier

pytestmark = pytest.mark.engines

Words = Callable[[int], list[int]]
MakeOracle = Callable[..., ModelOracle]


# ---- what a request gets ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_prompt_may_be_a_list_an_array_or_a_tensor(
    make_oracle: MakeOracle, lara: Any, words: Words, kind: Callable[[list[int]], Any]
) -> None:
    oracle = make_oracle(lara)
    prompt = words(40)
    expected = oracle.serve(prompt).answer.tokens
    answer = oracle.engine.generate(kind(prompt), max_new_tokens=4, stop_tokens=())
    assert answer.tokens == expected
    assert answer.reused == 32


def test_an_answer_ends_with_a_stop_token(make_oracle: MakeOracle, lara: Any, words: Words) -> None:
    engine = make_oracle(lara).engine
    picks = iter([7, 9, 5, 11])
    answer = engine.generate(words(20), max_new_tokens=4, stop_tokens={5}, choose=lambda _: next(picks))
    assert (answer.tokens, answer.stop) == ((7, 9, 5), "stop_token")


def test_the_stop_tokens_of_the_model_are_the_default(
    make_oracle: MakeOracle, lara: Any, words: Words
) -> None:
    engine = make_oracle(lara).engine
    lara.generation_config.eos_token_id = [3, 5]
    try:
        answer = engine.generate(words(20), max_new_tokens=4, choose=lambda _: 3)
    finally:
        lara.generation_config.eos_token_id = None
    assert (answer.tokens, answer.stop) == ((3,), "stop_token")


def test_an_answer_without_a_stop_token_ends_at_its_length(
    make_oracle: MakeOracle, lara: Any, words: Words
) -> None:
    answer = make_oracle(lara).engine.generate(words(20), max_new_tokens=3)
    assert (len(answer.tokens), answer.stop) == (3, "length")


def test_the_last_token_of_an_answer_is_not_kept(make_oracle: MakeOracle, lara: Any, words: Words) -> None:
    """Sampled and never fed back: with it the page would be whole."""
    oracle = make_oracle(lara)
    assert oracle.serve(words(30), new_tokens=2).answer.kept == 16
    assert oracle.serve(words(30), new_tokens=3).answer.kept == 32


@pytest.mark.parametrize("tier", Tier)
def test_namespaces_share_nothing(
    make_oracle: MakeOracle, lara: Any, words: Words, tmp_path: Path, tier: Tier
) -> None:
    """Whatever tier has the pages; without salt is a tenant of its own."""
    oracle = make_oracle(lara, stores=[{"kind": "disk", "path": str(tmp_path), "capacity": "64MiB"}])
    prompt, cache = words(60), oracle.engine.cache
    oracle.serve(prompt, namespace=Namespace(salt="a"))
    if tier == Tier.HOST:
        squeeze(cache, Tier.DEVICE)
    elif tier == Tier.STORE:
        assert cache.flush()
        cache.reset()
    for other in (Namespace(salt="b"), Namespace(), Namespace(lora="a")):
        assert oracle.serve(prompt, namespace=other).answer.reused == 0
    answer = oracle.serve(prompt, namespace=Namespace(salt="a")).answer
    assert (answer.reused, getattr(answer.source, tier.name.lower())) == (48, 48)


def test_a_request_that_fails_gives_everything_back(make_oracle: MakeOracle, lara: Any, words: Words) -> None:
    oracle = make_oracle(lara)
    prompt = words(60)

    def fail(logits: torch.Tensor) -> int:
        raise RuntimeError("no sampler today")

    with pytest.raises(RuntimeError, match="no sampler today"):
        oracle.engine.generate(prompt, max_new_tokens=4, choose=fail)
    cache = oracle.engine.cache
    assert cache.drain()
    assert cache.audit() == []
    assert all(pool.protected == pool.lease_owned == 0 for pool in cache.stats().pools.values())
    assert oracle.serve(prompt).is_right


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3", "LaraMini"])
def test_a_restored_turn_is_exact_with_any_attention(
    make_oracle: MakeOracle, words: Words, name: str, attention: str
) -> None:
    """Each makes its mask in another way, from the size of what the cache began with."""
    model = make_tiny_model(name)
    model.set_attn_implementation(attention)
    oracle = make_oracle(model)
    prompt = words(100)
    assert oracle.serve(prompt).is_right
    onward = oracle.serve([*prompt, *words(70)])
    assert onward.is_right, onward
    assert onward.answer.reused == 96


# ---- no room ------------------------------------------------------------------------------------------------------
def test_a_request_larger_than_the_device_pool_is_answered_and_kept_in_part(
    make_oracle: MakeOracle, model: Any, words: Words
) -> None:
    """What was kept is a boundary like any other: the next request starts from it and is exact."""
    oracle = make_oracle(model, device="160KiB", host=None, chunk_tokens=32)
    prompt = words(400)
    first = oracle.serve(prompt)
    assert first.is_right, first
    again = oracle.serve(prompt)
    assert again.answer.reused <= first.answer.kept
    assert again.is_right, again


def test_a_request_that_runs_out_of_room_says_what_it_kept(make_oracle: MakeOracle, words: Words) -> None:
    oracle = make_oracle(make_tiny_model("Llama"), device="160KiB", host=None, chunk_tokens=32)
    # 10 pages of 16 tokens at 1 KiB a token.
    prompt = words(400)
    assert oracle.serve(prompt).answer.kept == 160
    assert oracle.serve(prompt).answer.reused == 160


@pytest.mark.parametrize("chunk_tokens", [16, 4096])
def test_a_chunk_leaves_room_for_the_rest_of_its_prompt(
    make_oracle: MakeOracle, words: Words, chunk_tokens: int
) -> None:
    """Four fifths of an L1 of one budget: a chunk of all of it would have windows for all of it, too."""
    oracle = make_oracle(make_tiny_model("Gemma3"), device="512KiB", host=None, chunk_tokens=chunk_tokens)
    budget = device_budget(oracle.engine.cache.config)
    assert budget is not None
    num_pages = budget.num_units * 4 // 5 // budget.costs["full"]
    first = oracle.serve(words(num_pages * 16), new_tokens=1)
    assert first.is_right, first
    assert first.answer.kept == num_pages * 16


def test_a_chunk_displaces_no_more_than_an_eighth_of_l1(make_oracle: MakeOracle, words: Words) -> None:
    """Chats in half of L1, then a prompt of a third."""
    oracle = make_oracle(make_tiny_model("Gemma3"), device="1MiB", host=None, chunk_tokens=4096)
    cache = oracle.engine.cache
    budget = device_budget(cache.config)
    assert budget is not None
    chat_pages = 8
    of_chat = chat_pages * budget.costs["full"] + 3 * budget.costs["swa"]
    chats = [words(chat_pages * 16) for _ in range(budget.num_units // 2 // of_chat)]
    for chat in chats:
        oracle.serve(chat, new_tokens=1)
    oracle.serve(words(budget.num_units // 3 // budget.costs["full"] * 16), new_tokens=1)
    assert [cache.probe([*chat, 1]).boundary for chat in chats] == [chat_pages * 16] * len(chats)


def test_without_room_for_a_chunk_what_there_is_is_kept(make_oracle: MakeOracle, words: Words) -> None:
    """A chunk of 8 pages where there are 3: half, and half again."""
    oracle = make_oracle(make_tiny_model("Llama"), device="160KiB", host=None, chunk_tokens=128)
    cache = oracle.engine.cache
    with cache.match(words(112)) as other:
        other.reserve(112)
        prompt = words(128)
        served = oracle.serve(prompt, new_tokens=1)
    assert served.is_right, served
    assert served.answer.kept == 48


# ---- faults of the store ------------------------------------------------------------------------------------------
ERROR = Raise(OSError(5, "I/O error"))


@pytest.mark.parametrize("fault", [MISS, SHORT, FLIPPED, ERROR], ids=["miss", "short", "flipped", "error"])
@pytest.mark.parametrize("call", [None, 1, 2], ids=["always", "first", "second"])
def test_a_fault_of_the_store_shortens_the_hit_and_changes_no_logit(
    make_oracle: MakeOracle, lara: Any, words: Words, fault: Any, call: int | None
) -> None:
    store = ScriptedStore()
    oracle = make_oracle(lara, open_cache=partial(HiCache, background=False, store=store))
    prompt = words(150)
    oracle.serve(prompt)
    assert oracle.engine.cache.flush()
    oracle.engine.cache.reset()
    store.script("get", fault, call=call)
    judged = oracle.serve(prompt)
    assert judged.is_right, judged
    if call is None:
        assert judged.answer.reused == 0
    elif fault is not ERROR:  # after an error the page may be there: it is asked for once more
        assert judged.answer.reused < 144


# ---- identity -----------------------------------------------------------------------------------------------------
def test_equal_weights_share_a_store_and_others_do_not(
    make_oracle: MakeOracle, words: Words, tmp_path: Path
) -> None:
    stores = [{"kind": "disk", "path": str(tmp_path), "capacity": "64MiB"}]
    prompt = words(60)
    first = make_oracle(make_tiny_model("LaraMini", seed=1), stores=stores)
    first.serve(prompt)
    assert first.engine.cache.flush()
    other = make_oracle(make_tiny_model("LaraMini", seed=2), stores=stores)
    assert other.serve(prompt).answer.reused == 0
    same = make_oracle(make_tiny_model("LaraMini", seed=1), stores=stores)
    assert same.serve(prompt).answer.reused == 48


def test_one_weight_more_or_less_is_another_model() -> None:
    model = make_tiny_model("Llama")
    before = weights_digest(model)
    assert weights_digest(make_tiny_model("Llama")) == before
    with torch.no_grad():
        model.lm_head.weight[3, 5] += 1e-3
    assert weights_digest(model) != before


def test_the_same_weights_under_another_rope_are_another_model() -> None:
    one, other = (
        make_tiny_model("Llama", rope_parameters={"rope_type": "default", "rope_theta": theta})
        for theta in (1e4, 1e6)
    )
    assert weights_digest(one) != weights_digest(other)


def test_given_names_stand_in_the_configuration(lara: Any) -> None:
    with TransformersEngine(
        lara, tiny_settings(), name="lara", weights="r7", open_cache=open_quiet
    ) as engine:
        model = engine.cache.config.model
        assert (model.name, model.dtype) == ("lara", "float32")
        assert model.weights is not None
        assert model.weights.startswith("r7.")


def test_a_preset_and_its_components_give_way_to_the_model(lara: Any) -> None:
    with TransformersEngine(lara, "cpu", overrides={"model.page_size": 32}, open_cache=open_quiet) as engine:
        assert set(engine.cache.config.model.components) == {"full", "swa", "mamba"}
        assert engine.cache.page_size == 32


# ---- what is refused ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("prompt", "count", "said"),
    [
        pytest.param([], 4, "expected at least 1 of each", id="empty"),
        pytest.param([1], 0, "expected at least 1 of each", id="no-answer"),
        pytest.param([[1, 2]], 4, "one prompt a call", id="a-batch"),
        pytest.param([0.5], 4, "token ids", id="fractions"),
        pytest.param([3, -1], 4, "position 1", id="negative"),
    ],
)
def test_a_bad_request_is_refused(lara: Any, prompt: Any, count: int, said: str) -> None:
    with (
        TransformersEngine(lara, tiny_settings(), open_cache=open_quiet) as engine,
        pytest.raises(ValueError, match=said),
    ):
        engine.generate(prompt, max_new_tokens=count)


def test_more_tokens_than_learned_positions_are_refused_and_as_many_are_not() -> None:
    """Looked up beyond its table, a position is an index error; on a GPU it ends the process."""
    model = make_tiny_model("OPT", ffn_dim=64, word_embed_proj_dim=64, max_position_embeddings=128)
    with TransformersEngine(model, tiny_settings(), open_cache=open_quiet) as engine:
        assert len(engine.generate([5] * 120, max_new_tokens=9, stop_tokens=()).tokens) == 9
        with pytest.raises(ValueError, match="need 129 positions, and the model has learned 128; shorten"):
            engine.generate([5] * 120, max_new_tokens=10)


def test_computed_positions_have_no_such_end(words: Words) -> None:
    model = make_tiny_model("Llama", max_position_embeddings=64)
    with TransformersEngine(model, tiny_settings(), open_cache=open_quiet) as engine:
        assert len(engine.generate(words(100), max_new_tokens=3).tokens) == 3


def refused(model: Any, said: str, **settings: Any) -> None:
    with pytest.raises(ConfigError, match=said):
        TransformersEngine(model, tiny_settings(), **settings)


def test_a_model_in_training_mode_is_refused() -> None:
    refused(make_tiny_model("Llama").train(), r"model\.eval\(\)")


@pytest.mark.parametrize("kind", ["static", "offloaded_static", "offloaded", "quantized"])
def test_a_model_that_asks_for_another_cache_is_refused(kind: str) -> None:
    model = make_tiny_model("Llama")
    model.generation_config.cache_implementation = kind
    refused(model, rf"a cache of kind '{kind}'.*set model\.generation_config\.cache_implementation = None")


def test_a_model_whose_config_names_the_dynamic_cache_is_taken() -> None:
    model = make_tiny_model("Llama")
    model.generation_config.cache_implementation = "dynamic"
    with TransformersEngine(model, tiny_settings(), open_cache=open_quiet) as engine:
        assert len(engine.generate([1, 2, 3], max_new_tokens=2).tokens) == 2


def test_a_model_on_several_devices_is_refused() -> None:
    model = make_tiny_model("Llama")
    model.lm_head.to("meta")  # where accelerate leaves what it has put elsewhere
    refused(model, "spread over cpu, meta; load it onto one device")


def test_keys_that_depend_on_the_length_of_the_request_are_refused() -> None:
    rope = {
        "rope_type": "dynamic",
        "factor": 2.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
    }
    refused(make_tiny_model("Llama", rope_parameters=rope), "rope_type is dynamic")


def test_a_model_that_keeps_its_state_elsewhere_is_refused() -> None:
    model = make_tiny_model(
        "RecurrentGemma", lru_width=64, num_hidden_layers=3, conv1d_width=4, attention_window_size=32
    )
    refused(model, "cannot be attached")


def test_a_model_with_a_cache_of_its_own_is_refused() -> None:
    model = make_tiny_model("MiniMax", num_local_experts=2, num_experts_per_tok=1)
    refused(model, "a pass over 4 tokens with a DynamicCache failed: MiniMax uses cache of its own")


def test_a_layer_of_an_unknown_kind_is_refused_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    library = load_library()

    class NewLayer(library.cache_utils.DynamicLayer):  # type: ignore[misc, name-defined]  # known at run time only
        pass

    monkeypatch.setitem(library.cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", NewLayer)
    refused(make_tiny_model("Gemma3"), r"layer 1 \(layer type full_attention\) keeps a NewLayer")


def test_a_layer_type_without_a_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model("Gemma3")
    monkeypatch.delitem(load_library().cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "sliding_attention")
    refused(model, "layer type 'sliding_attention' has no DynamicCache layer")


def test_a_device_pool_elsewhere_than_the_model_is_refused(lara: Any) -> None:
    refused(
        lara,
        "tiers.device: is cuda:0, but the model is on cpu; set kind to cpu",
        overrides={"tiers.device.kind": "cuda"},
    )


def test_a_chunk_of_no_tokens_is_refused(lara: Any) -> None:
    refused(lara, "chunk_tokens: is 0", chunk_tokens=0)


def test_without_transformers_one_error_says_how_to_install_it(
    lara: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(EngineUnavailableError, match=r"pip install 'transformers>=5\.24'"):
        TransformersEngine(lara, tiny_settings())


def test_an_old_transformers_is_refused_with_the_version_wanted(
    lara: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = ModuleType("transformers")
    old.__version__ = "4.57.1"  # type: ignore[attr-defined]  # a module of the test's own
    monkeypatch.setitem(sys.modules, "transformers", old)
    with pytest.raises(EngineUnavailableError, match=r"4\.57\.1 is too old.*>=5\.24"):
        TransformersEngine(lara, tiny_settings())


@pytest.mark.parametrize(
    ("version", "is_old"), [("5.24.0", False), ("5.24.0.dev0", False), ("6.0", False), ("5.9.1", True)]
)
def test_versions_compare_by_number(version: str, is_old: bool) -> None:
    assert (release(version) < OLDEST) == is_old
