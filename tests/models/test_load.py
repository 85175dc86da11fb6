"""Loading from folders: what comes out, and every way a folder can be wrong."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import KINDS, VOCAB_SIZE, folder, make
from tiny import load as load_tiny

from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.errors import MlxgenError, ModelLoadError, OutOfMemoryError, UnsupportedError
from mlxgen.inputs import PreparedInput, PreparedMedium
from mlxgen.models import LoadOptions, LoadProgress, Model, load, supported_model_types

Copy = Callable[..., Path]
Edit = Callable[..., None]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_loads_as_mlx_lm_loads_it(kind: str) -> None:
    model = load(folder(kind))
    reference, tokenizer = load_tiny(kind)
    assert (model.vocab_size, model.context_length, model.eos_token_ids) == (VOCAB_SIZE, 4096, frozenset({2}))
    ids = mx.array(tokenizer.encode("Hello, world"), dtype=mx.uint32)
    from mlx_lm.models.cache import make_prompt_cache

    ours = model.forward(ids, cache=make_prompt_cache(model.module), start=0, inputs=None)
    theirs = reference(ids[None], cache=make_prompt_cache(reference))
    assert ours.shape == (1, ids.size, VOCAB_SIZE)
    assert np.array_equal(np.array(ours), np.array(theirs))
    assert model.num_bytes == sum(value.nbytes for value in load_file(folder(kind) / "model.safetensors").values())


def test_greedy_replies_of_the_tiny_models_wander() -> None:
    import mlx_lm

    for kind in KINDS:
        module, tokenizer = load_tiny(kind)
        prompt = tokenizer.encode("Hello, the user wants an answer.")
        reply = [step.token for step in mlx_lm.stream_generate(module, tokenizer, prompt, max_tokens=24)]
        assert len(reply) == 24
        assert len(set(reply)) > 8


def test_unpacks_as_with_mlx_lm() -> None:
    model = load(folder("llama"))
    module, tokenizer = model
    assert module is model.module
    assert tokenizer is model.tokenizer
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False).startswith("<|im_start|>")


def test_progress_ends_at_the_total() -> None:
    seen: list[LoadProgress] = []
    model = load(folder("llama"), on_progress=seen.append)
    assert (seen[-1].phase, seen[-1].done, seen[-1].total) == ("read", model.num_bytes, model.num_bytes)


def test_stop_between_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("mlxgen.models.load"), "_EVAL_BYTES", 100_000)
    token = CancelToken()
    seen: list[LoadProgress] = []

    def on_progress(progress: LoadProgress) -> None:
        seen.append(progress)
        token.cancel()

    with pytest.raises(Cancelled):
        load(folder("llama"), on_progress=on_progress, cancel=token)
    assert len(seen) == 1
    assert seen[0].done < seen[0].total


def test_text_model_refuses_media() -> None:
    model = load(folder("llama"))
    inputs = PreparedInput([1], media=[PreparedMedium("image")])
    with pytest.raises(UnsupportedError, match=r"text-only model"):
        model.forward(mx.array([1]), cache=[], start=0, inputs=inputs)


def test_generation_config_decides_what_ends_a_reply(copy_of: Copy) -> None:
    path = copy_of()
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    model = load(path)
    assert model.eos_token_ids == frozenset({2, 5})
    assert model.tokenizer.eos_token_ids == {2, 5}


def test_padded_vocabulary_counts_rows(tmp_path: Path) -> None:
    assert load(make("llama", tmp_path / "m", config={"vocab_size": 320})).vocab_size == 320


def test_template_in_chat_template_json_is_used(copy_of: Copy, edit_json: Edit) -> None:
    path = copy_of()
    edit_json(path / "tokenizer_config.json", chat_template=None)
    (path / "chat_template.json").write_text(json.dumps({"chat_template": "T:{{ messages[0]['content'] }}"}))
    tokenizer = load(path).tokenizer
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "T:hi"


def test_quantised_checkpoint_loads(tmp_path: Path) -> None:
    from mlx_lm.utils import load_model, quantize_model, save_model

    module, config = load_model(folder("llama"))
    module, config = quantize_model(module, config, group_size=32, bits=4)
    path = make("llama", tmp_path / "q")
    save_model(path, module)
    (path / "config.json").write_text(json.dumps(config))
    model = load(path)
    assert model.vocab_size == VOCAB_SIZE
    assert model.num_bytes < load(folder("llama")).num_bytes / 3


def test_from_parts_takes_what_mlx_lm_returns() -> None:
    module, tokenizer = load_tiny("qwen2")
    model = Model.from_parts(module, tokenizer)
    assert (model.vocab_size, model.context_length, model.path) == (VOCAB_SIZE, 4096, None)
    assert model.eos_token_ids == frozenset({2})
    # and a bare transformers tokenizer
    bare = Model.from_parts(module, tokenizer._tokenizer, config={"eos_token_id": 2})
    assert bare.eos_token_ids == frozenset({2})


# --- what can be wrong ---


def test_missing_folder_suggests_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "my-llama-4bit").mkdir()
    with pytest.raises(ModelLoadError, match=r"no folder .*did you mean '.*my-llama-4bit'"):
        load(tmp_path / "my-lama-4bit")


def test_file_instead_of_a_folder(copy_of: Copy) -> None:
    with pytest.raises(ModelLoadError, match=r"is a file"):
        load(copy_of() / "config.json")


def test_folder_without_config(tmp_path: Path, copy_of: Copy) -> None:
    copy_of("llama", "outer/inner")
    with pytest.raises(ModelLoadError, match=r"no config\.json, but its subfolder 'inner' has one"):
        load(tmp_path / "outer")


def test_folder_without_weights(copy_of: Copy) -> None:
    path = copy_of()
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"has a config.json but no weights"):
        load(path)


def test_folder_without_tokenizer(copy_of: Copy) -> None:
    path = copy_of()
    (path / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"has no tokenizer"):
        load(path)


@pytest.mark.parametrize("content", ["{", '{"model": {"type": "BPE", "vocab": 3}}', "[]", '"x"'])
def test_broken_tokenizer(content: str, copy_of: Copy) -> None:
    path = copy_of()
    (path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"the tokenizer in .* can't be loaded"):
        load(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "a JSON list, not an object"),
        ("{}", "has no model_type"),
        ('{"model_type": 3}', "model_type is 3"),
        ('{"model_type": "../evil"}', "model_type is"),
        ('{"model_type": "llama", "num_hidden_layers": 1%s}' % ("0" * 5000), "is not JSON"),
    ],
)
def test_broken_config(content: str, problem: str, copy_of: Copy) -> None:
    path = copy_of()
    (path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=problem):
        load(path)


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; a whole number from 1 to"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": 64.5}, "hidden_size is 64.5"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
        ({"head_dim": float("nan")}, "head_dim is nan"),
        ({"text_config": {"num_hidden_layers": 10**6}}, r"text_config\.num_hidden_layers is 1000000"),
        ({"vision_config": {"depth": 10**7}}, r"vision_config\.depth is 10000000"),
        ({"intermediate_size": [96, -1]}, "intermediate_size is -1"),
    ],
)
def test_absurd_numbers(entries: dict[str, Any], problem: str, copy_of: Copy, edit_json: Edit) -> None:
    path = copy_of()
    edit_json(path / "config.json", **entries)
    with pytest.raises(ModelLoadError, match=problem):
        load(path)


def test_unsupported_model_type(copy_of: Copy, edit_json: Edit) -> None:
    path = copy_of()
    edit_json(path / "config.json", model_type="lama3")
    with pytest.raises(ModelLoadError, match=r"model type 'lama3' .*isn't supported; closest: .*llama.*text types"):
        load(path)
    text, _ = supported_model_types()
    assert {"llama", "mistral", "gemma3_text", "qwen3_5"} <= text
    assert not {"cache", "base", "lama3"} & text


def test_weights_that_dont_fit_the_config(copy_of: Copy, edit_json: Edit) -> None:
    path = copy_of()
    edit_json(path / "config.json", hidden_size=128)
    with pytest.raises(ModelLoadError, match=r"can't be loaded"):
        load(path)


def test_config_that_lacks_an_entry(copy_of: Copy, edit_json: Edit) -> None:
    path = copy_of()
    edit_json(path / "config.json", num_attention_heads=None)
    with pytest.raises(ModelLoadError, match=r"can't be loaded"):
        load(path)


def test_missing_tensor(copy_of: Copy) -> None:
    path = copy_of()
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(path)


def test_crafted_header_is_refused_before_mlx_reads_it(copy_of: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy_of()
    header = b'{"a":{"dtype":"F32","shape":[2147483647,2147483647,4],"data_offsets":[0,4]}}'
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))

    def forbidden(*args: Any, **options: Any) -> Any:
        raise AssertionError("mx.load was called")

    monkeypatch.setattr(mx, "load", forbidden)
    with pytest.raises(ModelLoadError, match=r"not a valid safetensors file"):
        load(path)


def test_model_that_doesnt_fit_is_refused_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxgen.models.memory.available_bytes", lambda: 100_000)
    with pytest.raises(OutOfMemoryError, match=r"needs about 0\.40 MB \(weights 0\.40 MB\), but 0\.10 MB are"):
        load(folder("llama"))
    assert load(folder("llama"), options=LoadOptions(check_memory=False)).vocab_size == VOCAB_SIZE


def test_all_of_them_are_mlxgen_and_os_errors() -> None:
    assert issubclass(ModelLoadError, MlxgenError)
    assert issubclass(ModelLoadError, OSError)


# --- code in the folder ---

_EVIL = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


def test_model_file_isnt_run(copy_of: Copy, edit_json: Edit) -> None:
    path = copy_of()
    (path / "evil.py").write_text(_EVIL + "from mlx_lm.models.llama import Model, ModelArgs\n")
    edit_json(path / "config.json", model_file="evil.py")
    with pytest.raises(ModelLoadError, match=r"run its own code \('evil\.py'\).*trust_remote_code=True"):
        load(path)
    assert not (path / "ran").exists()
    load(path, options=LoadOptions(trust_remote_code=True))
    assert (path / "ran").exists()


def test_tokenizer_code_isnt_run(copy_of: Copy, edit_json: Edit, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy_of()
    (path / "tokenization_evil.py").write_text(_EVIL + "class EvilTokenizer: pass\n")
    auto_map = {"AutoTokenizer": [None, "tokenization_evil.EvilTokenizer"]}
    edit_json(path / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="EvilTokenizer")
    edit_json(path / "config.json", auto_map={"AutoConfig": "tokenization_evil.EvilTokenizer"})

    def asked(*args: Any) -> str:
        raise AssertionError("asked on the terminal")

    monkeypatch.setattr("builtins.input", asked)
    for options in (LoadOptions(), LoadOptions(tokenizer_config={"trust_remote_code": True})):
        with pytest.raises(ModelLoadError, match=r"trust_remote_code=True if you trust it"):
            load(path, options=options)
    assert not list(path.rglob("ran"))


def test_module_names_in_a_tokenizer_config_are_plain(copy_of: Copy, edit_json: Edit) -> None:
    path = copy_of()
    edit_json(path / "tokenizer_config.json", chat_template_type="../../evil")
    with pytest.raises(ModelLoadError, match=r"chat_template_type is '../../evil', not a plain name"):
        load(path)
