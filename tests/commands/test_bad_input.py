"""Bad input on the command line, in one table: the command, and the line that says what is wrong.

The exit code is 2, nothing is written to stdout, stderr has one line, and no file is made.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import byte_tokenizer, tiny_target

from offload_rt.commands import cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files and models that are bad in every way, and a good model."""
    folder = tmp_path_factory.mktemp("input")
    files = {
        "latin.txt": b"caf\xe9",
        "empty.txt": b"",
        "paper.pdf": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n",
        "long.txt": 7168 * b"a",
        "wide.txt": "text".encode("utf-16-le"),
        "words": b"1, 2 x",
        "list": b"[1, 3.5]",
        "half": b"[1, 2",
        "blank": b" \n",
        "beyond": b"1 2 9999",
        "levels.toml": b"[speculation]\nlevels = 3\n",
        "torn.toml": b"[speculation",
        "skips.toml": b"[speculation]\nlevels = [{model='target', cache='retrieved', layers='skip:30a'}]\n",
        "deep.toml": b"[retrieval]\nbudget = " + 20_000 * b"[",
        "digits.toml": b"[retrieval]\nbudget = " + 10_000 * b"9",
        "brackets": 100_000 * b"[",
        "ids": b"1 2",
        "store.safetensors": b"built before",
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    os.mkfifo(folder / "pipe.toml")
    (folder / "venv" / "lib").mkdir(parents=True)
    for name in ("venv/pyvenv.cfg", "venv/lib/site.py", "venv/.hidden.txt"):
        (folder / name).write_bytes(b"x")
    for name, harm in MODELS.items():
        model = tiny_target("llama")
        with torch.no_grad():
            if harm is not None and name.endswith("weights"):
                harm(model)
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
        if harm is not None and not name.endswith("weights"):
            harm(folder / name)
    return folder


def config(**changes: object) -> Callable[[Path], None]:
    """Changes what a model's config says."""

    def harm(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return harm


def cut(name: str) -> Callable[[Path], None]:
    """Keeps the first half of a file."""

    def harm(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])

    return harm


def remove(pattern: str) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return harm


def swap_two_tokens(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def integer_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name].mul(100).to(torch.int8)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def template(source: str) -> Callable[[Path], None]:
    """Gives a model's tokenizer a chat template."""

    def harm(folder: Path) -> None:
        (folder / "chat_template.jinja").write_text(source)

    return harm


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 4096}

MODELS: dict[str, Callable[..., object] | None] = {
    "model": None,
    "cut-config": cut("config.json"),
    "wrong-size": config(hidden_size=128),
    "fewer-layers": config(num_hidden_layers=1),
    "strange": config(model_type="perceptron9000"),
    "no-config": remove("config.json"),
    "no-files": remove("*.safetensors"),
    "cut-file": cut("model.safetensors"),
    "cut-tokenizer": cut("tokenizer.json"),
    "no-tokenizer": remove("token*"),
    "other-tokens": swap_two_tokens,
    "many-layers": config(num_hidden_layers=10_000_000),
    "no-layers": config(num_hidden_layers=0),
    "no-heads": config(num_key_value_heads=0),
    "negative": config(vocab_size=-1),
    "activation": config(hidden_act="nope"),
    "gptq": config(quantization_config={"quant_method": "gptq", "bits": 4}),
    "quanto": config(quantization_config={"quant_method": "quanto", "weights": "int4"}),
    "integers": integer_weights,
    "unloaded": lambda folder: [
        template("{% for m in messages %}{{ m.content }}{% endfor %}")(folder),
        remove("*.safetensors")(folder),
    ],
    "failing-template": template("{{ raise_exception('not today\nnor tomorrow') }}"),
    "yarn": config(rope_parameters=YARN),
    "nan-weights": lambda model: model.model.layers[1].mlp.up_proj.weight[0, 0].fill_(torch.nan),
    "overflowing-weights": lambda model: model.model.layers[0].mlp.down_proj.weight.fill_(3e38),
    "inf-weights": lambda model: model.model.layers[0].mlp.up_proj.weight[0, 0].fill_(torch.inf),
}

OWN = "generate --model F/model --config plain"

TABLE = [
    # Commands and flags.
    ("chatter", "'chatter'"),
    ("generate --promt abc", "--promt"),
    ("models F/no", "no: there is no such folder; name one that holds models"),
    ("models F/empty.txt", "empty.txt: there is no such folder; name one"),
    ("models --context 0", "'0' is not a number of tokens"),
    ("models --json F/no/out.json", "its folder does not exist"),
    ("config", "show|path"),
    ("config edit", "'edit'"),
    ("completion", "shell"),
    ("completion csh", "'csh'"),
    ("generate -n many", "'many'"),
    ("generate --device tpu", "'tpu' is not a device: use auto, cpu, cuda or cuda:0,cuda:1"),
    ("generate --device cuda:0,cpu", "'cuda:0,cpu' is not a device"),
    ("generate --json F", "is a folder"),
    ("generate --json F/no/out.json", "its folder does not exist"),
    (f"{OWN} --prompt a -n 0", "'0' is not a number of tokens"),
    (f"{OWN} --prompt a --temperature -1", "temperature -1.0 is out of range"),
    (f"{OWN} --prompt a --temperature nan", "temperature nan is out of range"),
    (f"{OWN} --prompt a --top-p 0", "top-p 0.0 is out of range"),
    (f"{OWN} --prompt a --top-k -1", "top-k -1 is out of range"),
    (f"{OWN} --prompt a --min-p 2", "min-p 2.0 is out of range"),
    (f"{OWN} --prompt a --repetition-penalty 0", "repetition-penalty 0.0 is out of range"),
    (f"{OWN} --prompt a --presence-penalty 3", "presence-penalty 3.0 is out of range"),
    (f"{OWN} --prompt a --frequency-penalty nan", "frequency-penalty nan is out of range"),
    (f"{OWN} --prompt a --seed -1", "seed -1 is out of range"),
    (f"{OWN} --prompt a --stop ''", "a stop string is empty"),
    (f"{OWN} --prompt a --device cuda", "finds no CUDA device"),
    (f"{OWN} --prompt a --device cuda:0,cuda:1", "device cuda:0: torch"),
    # Prompts.
    ("generate abc", "'abc'; give a prompt with --prompt"),
    ("generate --prompt ''", "--prompt: is empty; give at least one character"),
    ("generate --prompt caf\udce9", "--prompt: not UTF-8 (byte 3 is 0xe9)"),
    ("generate --prompt a --prompt-tokens F/ids", "--prompt-tokens and --prompt: token IDs cannot be joined"),
    ("generate --prompt-tokens F/ids -", "stdin: cannot be read"),
    ("generate --prompt-file F/empty.txt --prompt a", "empty.txt: is empty; give at least"),
    ("generate --prompt-file F/no.txt", "no.txt: cannot be read (No such file"),
    ("generate --prompt-file F", "cannot be read (Is a directory)"),
    (
        "generate --prompt-file F/latin.txt",
        "latin.txt: not UTF-8 (byte 3 is 0xe9); name its encoding (--encoding cp1252)",
    ),
    ("generate --prompt-file F/empty.txt", "empty.txt: is empty; give at least"),
    (
        "generate --prompt-file F/paper.pdf",
        "paper.pdf: this PDF cannot be read (Stream has ended unexpectedly); save it anew, or give its text",
    ),
    ("generate --prompt-file F/wide.txt", "wide.txt: byte 1 is zero, so it is not a text"),
    ("generate --prompt-tokens F/no", "token file F/no: cannot be read (No such"),
    ("generate --prompt-tokens F/words", "words: entry 3 is 'x'; give integers"),
    ("generate --prompt-tokens F/list", "list: entry 2 is 3.5; give integers"),
    ("generate --prompt-tokens F/half", "half: starts with [ but is not a JSON list"),
    ("generate --prompt-tokens F/brackets", "brackets: starts with [ but is not a JSON list"),
    ("generate --prompt-tokens F/blank", "blank: the prompt is empty; give at least one"),
    (f"{OWN} --prompt-tokens F/beyond", "prompt token 9999 is outside the vocabulary of 256"),
    ("demo --prompt-tokens F/words --prompt a", "words: entry 3 is 'x'"),
    ("generate --max-prompt-tokens 0", "'0' is not a number of tokens, like 100000, 96k or 1M"),
    ("generate --max-prompt-tokens 1,00", "'1,00' is not a number of tokens"),
    (f"{OWN} --prompt a -n 9000", "use at most 8191 new tokens"),
    (
        "generate --prompt-file F/latin.txt --encoding klingon",
        "encoding 'klingon' is unknown; name one of Python's",
    ),
    # Questions.
    (
        "generate --prompt a --json-schema F/no.json",
        "no.json: cannot be read (No such file or directory); give",
    ),
    ("generate --prompt a --json-schema F/empty.txt", "empty.txt: is empty"),
    ("generate --prompt a --json-schema {", "json-schema '{' is not JSON: Expecting property name"),
    ("generate --prompt a --json-schema F/list", "json-schema must be a JSON object, got '[1, 3.5]'"),
    (
        """ask Who? --json-schema '{"type": "nope"}'""",
        "json-schema is refused by llguidance: Invalid type: nope",
    ),
    ("ask Who? --thinking on --json-schema {}", "json-schema cannot be combined with thinking: omit"),
    ("ask", "the following arguments are required: QUESTION"),
    ("ask ''", "the question is '': give a text"),
    ("ask -", "stdin: cannot be read"),
    ("chat --quiet --config plain", "stdin: cannot be read"),
    ("ask Who? --file F/no.txt", "no.txt: cannot be read (No such file"),
    ("chat --file F/long.txt --file F/empty.txt", "empty.txt: is empty"),
    ("ask Who? --file F/latin.txt", "latin.txt: not UTF-8 (byte 3 is 0xe9); name its encoding (--encoding"),
    ("ask Who? --file F/latin.txt --encoding utf-32", "latin.txt: not utf-32 (byte 0 is 0x63)"),
    ("ask Who? --file F/paper.pdf", "paper.pdf: this PDF cannot be read"),
    ("ask Who? --max-prompt-tokens 3", "--max-prompt-tokens"),
    ("chat --thinking maybe", "'maybe' (choose from"),
    ("chat --top-p 0", "top-p 0.0 is out of range"),
    (
        "ask Who? --model F/model",
        "model F/model has no chat template and so cannot chat: take an instruct model",
    ),
    (
        "chat --model F/no-tokenizer",
        "no-tokenizer has no tokenizer and so cannot chat: take an instruct model",
    ),
    ("chat --model F/failing-template", "the chat template of F/failing-template fails: not today"),
    (
        "ask Who? --model F/unloaded --file F/long.txt",
        "7174 prompt tokens and 1024 new ones are more than the 8192 positions of F/unloaded: use at most"
        " 7168 prompt tokens",
    ),
    (
        "chat --model F/unloaded --file F/long.txt -n 2000",
        "7168 prompt tokens and 2000 new ones are more than the 8192 positions of F/unloaded",
    ),
    # Configurations.
    ("generate --set retrieval.budget", "section.key=value"),
    ("generate --prompt a --config nothing", "unknown config 'nothing'"),
    ("generate --prompt a --config F", "is a folder; give a TOML file"),
    ("generate --prompt a --config F/no.toml", "no such file"),
    ("generate --prompt a --config F/torn.toml", "not valid TOML"),
    ("generate --prompt a --config F/pipe.toml", "is a pipe or a device; give a TOML file"),
    ("generate --prompt a --config F/deep.toml", "deep.toml: its values are nested too deeply"),
    ("generate --prompt a --config F/digits.toml", "digits.toml: not valid TOML: Exceeds the limit"),
    (f"generate --set retrieval.budget={5000 * '['}", "retrieval.budget: its value is nested too deeply"),
    (f"generate --set {5000 * 'a'}", "aaa...aaa"),
    (f"generate --prompt a --set retrieval.budget={'a' * 5000}", "aaa': must be an integer"),
    (
        "generate --prompt a --set store.page=7",
        "override: store.page does not go with the default of another key: store.slab_tokens = 4096: must be"
        " a multiple of store.page = 7",
    ),
    ("generate --prompt a --config F/levels.toml", "speculation.levels = 3: must be a list"),
    ("generate --prompt a --set retrieval.budgt=3", "unknown key retrieval.budgt; did you mean"),
    (
        "generate --prompt a --set retrieval.budget=3",
        "retrieval.budget = 3: must be 0 (the planner decides) or at least 264",
    ),
    ("generate --prompt a --set retrieval.chunk=7", "must divide store.page"),
    (f"{OWN} --prompt a --config naive", "drafts with a small model, and there is none"),
    (
        "generate --model F/model --prompt a --config F/skips.toml",
        "layers 'skip:30a': layer 30 does not exist in a model of 2 layers, 0 to 1",
    ),
    # Datastores.
    ("datastore build F/no", "no: is not a folder; name one that holds text files"),
    ("datastore build F/venv --out F/store.safetensors", "store.safetensors: exists; name another file"),
    ("datastore build F/venv/lib --out F/store", "must end with .safetensors; name it store.safetensors"),
    # Models.
    ("generate --prompt a --model F/modle", "model F/modle: there is no such folder"),
    ("generate --prompt a --model F/empty.txt", "is a file; name the folder"),
    ("generate --prompt a --model F/no-config", "there is no config.json in it"),
    ("generate --prompt a --model F/cut-config", "its config.json cannot be read"),
    (
        "generate --prompt a --model F/strange",
        "does not know its architecture, perceptron9000; a newer version may",
    ),
    ("generate --prompt a --model F/no-files", "there are no weights in it"),
    ("generate --prompt a --model F/cut-file", "model.safetensors is truncated or corrupt"),
    (
        "generate --prompt a --model F/wrong-size",
        "its config.json does not describe its weights: lm_head.weight is [256, 64] in the files and"
        " [256, 128] by the config; download both again",
    ),
    (
        "generate --prompt a --model F/fewer-layers",
        "its config.json does not describe its weights: 9 of those in the files have no place by the config,"
        " the first is model.layers.1.input_layernorm.weight; download both again",
    ),
    (
        "generate --prompt a --model F/many-layers",
        "config.json has num_hidden_layers = 10000000; a model has 1 to 1024",
    ),
    ("plan --context 9 --gpu none --model F/many-layers", "has num_hidden_layers = 10000000"),
    ("generate --prompt a --model F/no-layers", "num_hidden_layers = 0; a model has 1 to 1024"),
    ("plan --context 9 --gpu none --model F/no-layers", "num_hidden_layers = 0; a model has 1 to 1024"),
    ("generate --prompt a --model F/no-heads", "num_key_value_heads = 0; a model has 1 to 4096"),
    ("generate --prompt a --model F/negative", "config.json has vocab_size = -1"),
    ("generate --prompt a --model F/activation", "config.json has hidden_act = 'nope', which is unknown"),
    ("generate --prompt a --model F/gptq", "gptq weights need gptqmodel and optimum: "),
    (
        "generate --prompt a --model F/gptq --quantize nf4",
        "are quantized already (gptq); leave --quantize out",
    ),
    (
        "plan --context 64 --gpu none --model F/quanto",
        "its weights are quantized (quanto), which is not supported; give",
    ),
    (
        "generate --prompt a --model F/integers",
        "model.layers.1.mlp.up_proj.weight in model.safetensors is of the integer type I8",
    ),
    (
        "generate --prompt a --model F/model --rope linear:2",
        "rope 'linear:2': write yarn:FACTOR, e.g. yarn:4",
    ),
    ("generate --prompt a --model F/model --rope yarn:1", "a factor is above 1"),
    (
        "generate --prompt a --model F/yarn --rope yarn:2",
        "scales its rotary frequencies already (yarn), to 8192",
    ),
    ("generate --prompt a --model F/nan-weights", "layers.1.mlp.up_proj.weight has NaN or infinite"),
    ("generate --prompt a --model F/inf-weights", "layers.0.mlp.up_proj.weight has NaN or infinite"),
    (
        "generate --prompt a --config plain --model F/overflowing-weights",
        "is in the output of layer 0; it overflows even in float32, so check its files",
    ),
    ("generate --prompt a --model F/cut-tokenizer", "its tokenizer cannot be read"),
    ("generate --prompt a --model F/no-tokenizer", "give token IDs with --prompt-tokens FILE"),
    (
        "generate --prompt a --config naive --model F/model --draft F/other-tokens",
        "draft F/other-tokens has another vocabulary than the target F/model",
    ),
    # Machines.
    ("doctor --json F", "is a folder"),
    ("doctor --json F/no/out.json", "its folder does not exist"),
    ("doctor --refreshed", "--refreshed"),
    # Plans.
    ("plan --model llama2-7b", "--context"),
    ("plan --model nothing --context 10 --gpu none", "no shape of that name"),
    ("plan --context 10 --gpu rtx9", "--gpu rtx9"),
    ("plan --context 10kk --gpu none", "'10kk' is not a number of tokens, like 100000, 96k or 1M"),
    ("plan --context 1.5 --gpu none", "'1.5' is not a number of tokens"),
    (f"plan --context {5000 * '9'} --gpu none", "999' is not a number of tokens"),
    ("plan --context 10 --link 25", "--link describes another machine: name its GPU"),
    ("plan --context 10 --gpu none --dram -1", "--dram -1"),
    ("plan --context 10 --gpu none --gpus 0", "--gpus describes a GPU, and --gpu none has none"),
    ("plan --context 10 --gpu l40 --gpus 0", "--gpus 0"),
    ("plan --context 10 --gpu l40 --gpus 1000000", "--gpus 1000000: must be at most 64"),
    ("plan --context 10 --gpu l40 --dram inf", "--dram inf: must be a finite number above 0"),
    ("plan --context 10 --gpu none --config nothing", "unknown config 'nothing'"),
    ("plan --context 10 --gpu none --set retrieval.size=1", "retrieval.size"),
    ("plan --context 10 --gpu none --acceptance 2", "acceptance 2"),
    ("plan --context -5 --gpu none", "'-5' is not a number of tokens"),
    ("plan --context 10 --gpu none --json /no/such/folder/x", "its folder does not exist"),
    ("plan --context 10 --gpu none --config naive --draft none", "drafts with a small model"),
    (
        "plan --model llama3.1-8b --context 200000 --gpu rtx4090",
        "199744 prompt tokens and 256 new ones are more than the 131072 positions of llama3.1-8b: use at most"
        " 130816 prompt tokens",
    ),
    (
        "plan --model Qwen3-32B --context 512k --gpu h100",
        "are more than the 40960 positions of qwen3-32b: use at most 40704 prompt tokens",
    ),
    (
        "plan --model llama3.1-8b --context 9 --gpu none --rope yarn:4",
        "positions are scaled already, to 131072",
    ),
]


@pytest.mark.parametrize(("command", "line"), TABLE, ids=[row[0][:90] for row in TABLE])
def test_bad_input(command: str, line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(folder.rglob("*"))
    arguments = [folder if part == "F" else part.replace("F/", f"{folder}/") for part in shlex.split(command)]
    assert cli.main(list(map(str, arguments))) == 2
    out, err = capsys.readouterr()
    if err.startswith("run        "):  # it shows in the weights alone, and they are read after that line
        err = err.split("\n", 1)[1]
    assert out == "" and err.startswith("offload-rt: error: ") and err.count("\n") == 1
    assert len(err) < 1200  # whatever was given
    assert line.replace("F/", f"{folder}/") in err
    assert sorted(folder.rglob("*")) == before
