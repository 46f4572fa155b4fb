"""Tokenizers, and the bytes that stand behind predicted tokens."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from lmres.data import (
    Batches,
    ByteTokenizer,
    DataConfig,
    DataError,
    Tokenizer,
    get_tokenizer,
    load_splits,
    open_store,
    prepare,
)

TEXTS = [
    "The quiet river — café naïve 日本 über the harbor.",
    "  leading spaces and\nline ends\n",
    "日本語 begins in a script of three bytes, 🙂 has four.",
    "🙂 first",
    "plain words pass the gentle lantern",
] * 6


def byte_level(path, **changes):
    """A small byte-level vocabulary; its file also asks for truncation, padding and a template."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64, pad_token="<pad>", pad_id=1)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    path.write_text(json.dumps({**json.loads(tokenizer.to_str()), **changes}))
    return str(path)


def piece_model(path, **options):
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([t.strip().replace("\n", " ") for t in TEXTS]),
        model_writer=out,
        **{
            "vocab_size": 330,
            "model_type": "bpe",
            "byte_fallback": True,
            "character_coverage": 0.98,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "minloglevel": 2,
            **options,
        },
    )
    path.write_bytes(out.getvalue())
    return str(path)


@pytest.fixture(scope="module", params=["bytes", "tokenizers", "sentencepiece"])
def name(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "tokenizers":
        return byte_level(folder / "tokenizer.json")
    return piece_model(folder / "pieces.model") if request.param == "sentencepiece" else "bytes"


def test_round_trip_and_protocol(name):
    tokenizer = get_tokenizer(name)
    assert isinstance(tokenizer, Tokenizer)
    for text in TEXTS[:5]:
        ids = tokenizer.encode(text)
        assert ids.ndim == 1
        assert ((ids >= 0) & (ids < tokenizer.vocab_size)).all()
        assert tokenizer.eos_id not in ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_id]) == text
        (encoded,) = tokenizer.encode_documents([text])
        assert encoded.ids.tolist() == ids.tolist()
    assert tokenizer.decode([]) == ""
    assert tokenizer.encode("").size == 0


def test_cut_characters_decode_without_an_error(name):
    tokenizer = get_tokenizer(name)
    ids = tokenizer.encode("a🙂日")
    for start in range(len(ids)):
        for end in range(start, len(ids) + 1):
            assert isinstance(tokenizer.decode(ids[start:end]), str)
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(
            DataError, match=f"cannot decode id {wrong}: the tokenizer has {tokenizer.vocab_size} ids"
        ):
            tokenizer.decode([1, wrong])


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_bytes_round_trip_any_text(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text).tobytes() == text.encode()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def bytes_of(name, ids):
    """Bytes that ids stand for inside a document, by each kind's own rule; independent of the tested code."""
    if name == "bytes":
        return len(ids)
    if name.endswith("json"):
        # The byte-level alphabet writes each byte as one character.
        pieces = json.loads(Path(name).read_text())["model"]["vocab"]
        by_id = {i: p for p, i in pieces.items()}
        return sum(len(by_id[i]) for i in ids)
    model = sentencepiece.SentencePieceProcessor(model_file=name)
    return sum(1 if model.is_byte(i) else len(model.id_to_piece(i).replace("▁", " ").encode()) for i in ids)


def test_bytes_of_all_targets_are_exact(name, tmp_path):
    path = tmp_path / "a.jsonl"
    texts = [f"{t}{i}" for i, t in enumerate(TEXTS)]
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    config = DataConfig(train=str(path), tokenizer=name)
    store = open_store(prepare(config, tmp_path / "store").path)
    tokenizer = get_tokenizer(name)
    assert sum(s.info.text_bytes for s in store.splits.values()) == sum(len(t.encode()) for t in texts)
    for split in store.splits.values():
        documents = [split.document(i).tolist() for i in range(split.info.documents)]
        assert all(d[-1] == tokenizer.eos_id and tokenizer.eos_id not in d[:-1] for d in documents)
        wanted = sum(bytes_of(name, d[1:-1]) for d in documents)
        assert split.info.target_bytes == wanted
        assert split.info.targets == sum(len(d) - 1 for d in documents)
        for packing in ("concat", "none"):
            batches = Batches(split, 16, 2, packing=packing, repeat="small")
            assert batches.target_bytes == wanted
            assert batches.bytes_per_target == pytest.approx(
                wanted / sum(b["weights"].sum() for b in batches.eval_batches(3))
            )


def test_first_token_may_be_a_part_of_a_character(name):
    tokenizer = get_tokenizer(name)
    for text in ("🙂x", "語", " a", "plain"):
        (encoded,) = tokenizer.encode_documents([text])
        rest = bytes_of(name, encoded.ids[1:].tolist())
        assert encoded.first_bytes == len(text.encode()) - rest


def with_prefix(path, kind):
    """A byte-fallback vocabulary whose encoder may put a space of its own before the text."""
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if kind == "metaspace":
        made.pre_tokenizer = pre_tokenizers.Metaspace()
    elif kind == "llama":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        made.decoder = decoders.ByteLevel()
    special = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    made.train_from_iterator(["the river", " the river passes"] * 5, trainer)
    made.save(str(path))
    return str(path), made.id_to_token


@pytest.mark.parametrize("kind", ["metaspace", "llama", "byte-level", "sentencepiece", "sentencepiece plain"])
def test_a_space_that_the_encoder_adds_is_no_byte_of_the_text(tmp_path, kind):
    if kind.startswith("sentencepiece"):
        path = piece_model(tmp_path / "a.model", add_dummy_prefix="plain" not in kind)
        piece = sentencepiece.SentencePieceProcessor(model_file=path).id_to_piece
    else:
        path, piece = with_prefix(tmp_path / "tokenizer.json", kind)
    for text in ("the river", " the river", "  the river"):
        (encoded,) = get_tokenizer(path).encode_documents([text])
        # Only the first piece can hold a space that the text lacks; the rest says what is left for it.
        rest = "".join(piece(i).replace("▁", " ").replace("Ġ", " ") for i in encoded.ids[1:].tolist())
        assert text.endswith(rest)
        assert encoded.first_bytes == len(text) - len(rest)


def test_special_names_in_the_text_are_ordinary_text(tmp_path):
    tokenizer = get_tokenizer(byte_level(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("a <|endoftext|> b")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "a <|endoftext|> b"


def test_end_token_by_name_and_by_default(tmp_path):
    path = byte_level(tmp_path / "tokenizer.json")
    assert get_tokenizer(str(tmp_path)).eos_id == get_tokenizer(path).eos_id == 0
    assert get_tokenizer(path, "<pad>").eos_id == 1
    assert get_tokenizer(path).fingerprint != get_tokenizer(path, "<pad>").fingerprint
    with pytest.raises(DataError, match=r"no token to end a document with \(looked for <end>\)"):
        get_tokenizer(path, "<end>")
    with pytest.raises(DataError, match="eos_token"):
        get_tokenizer("bytes", "</s>")
    pieces = piece_model(tmp_path / "a.model")
    assert get_tokenizer(pieces).eos_id == sentencepiece.SentencePieceProcessor(model_file=pieces).eos_id()
    without = piece_model(tmp_path / "b.model", eos_id=-1)
    with pytest.raises(DataError, match=r"data\.eos_token"):
        get_tokenizer(without)
    assert get_tokenizer(without, "<s>").eos_id == 1


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.json", b"{}", "not a readable tokenizer.json"),
        ("a.model", b"junk", "not a readable sentencepiece model"),
        ("a.bin", b"", "unknown kind"),
        (None, b"", "no such file"),
    ],
)
def test_files_that_are_no_tokenizers(tmp_path, file, content, message):
    if file:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=message):
        get_tokenizer(str(tmp_path / (file or "none.json")))


def test_a_store_of_another_tokenizer_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\nthree\n")
    config = DataConfig(train=str(path), text_unit="line")
    store = prepare(config, tmp_path / "store").path
    splits = load_splits(DataConfig(train=str(store), repeat="small"), 4, 2)
    assert splits.tokenizer.decode(splits.train.store.document(0)) in ("one", "two")
    with pytest.raises(DataError, match="was made with tokenizer bytes-257"):
        load_splits(DataConfig(train=str(store), tokenizer=byte_level(tmp_path / "tokenizer.json")), 4, 2)
    with pytest.raises(DataError, match="the store holds both splits"):
        load_splits(DataConfig(train=str(store), valid=str(path)), 4, 2)
    with pytest.raises(DataError, match="prepared store"):
        prepare(DataConfig(train=str(store)), tmp_path / "again")


def test_ids_with_gaps_count_up_to_the_largest(tmp_path):
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 7, "</s>": 90}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = get_tokenizer(str(tmp_path))
    assert (found.vocab_size, found.eos_id) == (91, 90)
    assert found.encode("b").tolist() == [7]


def test_wide_vocabulary_of_a_tokenizer_needs_32_bits(tmp_path):
    vocab = {f"w{i}": i for i in range(70000)} | {"</s>": 70000, "[UNK]": 70001}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_text("w65535 w65536 w69999 w1\nw4463 w0 w65536\n")
    config = DataConfig(
        train=str(tmp_path / "a.txt"), text_unit="line", tokenizer=str(tmp_path / "words.json")
    )
    store = open_store(prepare(config, tmp_path / "store").path)
    assert store.info.dtype == "uint32"
    found = sorted(s.document(0).tolist() for s in store.splits.values())
    assert found == [[4463, 0, 65536, 70000], [65535, 65536, 69999, 1, 70000]]
    batch = next(Batches(store.splits["valid"], 8, 1, repeat="small").eval_batches(1))
    assert batch["inputs"].dtype == np.int32
    assert 65536 in batch["inputs"]
