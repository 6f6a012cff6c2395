"""The program around the commands: Ctrl-C, suggestions, whole names of options, completion, and speed."""

from __future__ import annotations

import json
import sys

import pytest
from counting import calls_of
from processes import captured

from scan_registry.cli import COMMANDS, command, main, parser
from scan_registry.cli import inspect as inspect_command
from scan_registry.cli.errors import INTERRUPTED
from scan_registry.cli.listing import arch_label
from scan_registry.dispatch import policy

Capture = pytest.CaptureFixture[str]


def error(capsys: Capture, *words: str) -> str:
    """What a call that cannot be meant prints: one line."""
    with pytest.raises(SystemExit) as left:
        main(words)
    caught = capsys.readouterr()
    assert (left.value.code, caught.out, caught.err.count("\n")) == (2, "", 1)
    return caught.err.removeprefix("scan-registry: error: ")


def test_ctrl_c(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect_command, "run", interrupt)
    assert main(["inspect"]) == INTERRUPTED == 130
    assert capsys.readouterr().err == "scan-registry: interrupted\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspekt"], "no command 'inspekt'; did you mean inspect? See `scan-registry --help`."),
        (["cache", "lst"], "cache has no command 'lst'; did you mean list?"),
        (["inspect", "--kernal=x"], "has no option --kernal; did you mean --kernel?"),
        (["bench", "--bss", "4", "rnn"], "bench has no option --bss; did you mean --bs?"),
        (["bench", "linear_scan", "rnn"], "'linear_scan' is one word too many before 'rnn'."),
        (["bench", "linear_scna"], "bench has no command 'linear_scna'; did you mean linear_scan?"),
        (["inspect", "-x"], "inspect has no option -x."),
        (["inspect", "more"], "'more' is one word too many."),
        (["hepl"], "no command 'hepl'; did you mean help?"),
        (["help", "doktor"], "no command 'doktor'; did you mean doctor?"),
        (["version", "x"], "'x' is one word too many"),
        (["--vers"], "scan-registry has no option --vers; did you mean --version?"),
    ],
)
def test_what_is_unknown_gets_a_suggestion(capsys: Capture, words: list[str], said: str) -> None:
    assert said in error(capsys, *words)


@pytest.mark.parametrize("words", [[], ["--json"], ["--case", "rnn"]])
def test_bench_takes_the_name_of_what_it_times_anyway(words: list[str]) -> None:
    own = ["bench", *words, "linear_scan", "--fwd-only"]
    assert parser(own).parse_args(own) == parser(own).parse_args(["bench", *words, "--fwd-only"])


def printed(capsys: Capture, *words: str) -> str:
    """What a call prints that ends the program by itself."""
    with pytest.raises(SystemExit) as left:
        main(words)
    caught = capsys.readouterr()
    assert (left.value.code, caught.err) == (0, "")
    return caught.out


def test_help_and_version_are_words_as_well_as_options(capsys: Capture) -> None:
    for words in (["version"], ["-V"]):
        assert printed(capsys, *words) == printed(capsys, "--version")
    for words in ([], ["inspect"], ["cache", "list"]):
        assert printed(capsys, "help", *words) == printed(capsys, *words, "--help")


def refused(capsys: Capture, *words: str) -> str:
    """What a call prints whose command refuses an argument: one line."""
    assert main(words) == 2
    caught = capsys.readouterr()
    assert (caught.out, caught.err.count("\n")) == ("", 1)
    return caught.err


def test_mistyped_values_get_a_suggestion(capsys: Capture) -> None:
    for words, said in (
        (["inspect", "--family", "gated_scn"], "; did you mean gated_scan?"),
        (["inspect", "--arch", "ptx8"], "; did you mean ptx80?"),
        (["verify", "--arch", "H10O"], "; did you mean H100?"),
        (["selftest", "--family", "lin"], "; did you mean linear_scan?"),
        (
            ["explain", "linar_scan", "--dtype", "bf16", "--shape", "1"],
            "; did you mean linear_scan?",
        ),
    ):
        assert refused(capsys, *words).endswith(f"{said}\n")


def test_an_architecture_may_be_named_by_its_gpu(capsys: Capture) -> None:
    for name in ("H100", "h200", "NVIDIA H100 80GB HBM3", "9.0", "sm_90", "sm90"):
        assert arch_label(name) == "sm90"
    assert arch_label("RTX 4090") == arch_label("rtx4090") == "sm89"
    assert arch_label("H1000") == "H1000"
    assert "no archive of sm75 (T4) is installed; " in refused(capsys, "inspect", "--arch", "T4")


@pytest.mark.parametrize("words", [["inspect", "--kern", "x"], ["verify", "--re"]])
def test_no_option_is_taken_by_its_beginning(capsys: Capture, words: list[str]) -> None:
    assert "did you mean --" in error(capsys, *words)


def test_options_before_a_command_of_a_command_are_its_own(capsys: Capture) -> None:
    for words in (["--bs", "4", "rnn"], ["--bs=4", "rnn"], ["rnn", "--bs", "4"]):
        assert parser().parse_args(["bench", *words]).bs == 4
    assert parser().parse_args(["bench", "--bs", "4", "rnn", "--bs", "3"]).bs == 3
    assert parser().parse_args(["bench", "--bs", "4"]).bs == 4
    assert "bench rnn has no option --d_model" in error(capsys, "bench", "--d_model", "4", "rnn")


def test_only_the_module_of_the_command_is_imported() -> None:
    script = """
import json, sys
from scan_registry.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
print(json.dumps(sorted(sys.modules)))
"""
    result = captured([sys.executable, "-c", script], cwd="/", check=True)
    loaded = set(json.loads(result.stdout.splitlines()[-1]))
    assert not {f"scan_registry.cli.{name}" for name in COMMANDS} & loaded
    assert not {"rich", "torch", "triton", "numpy", "importlib.metadata"} & loaded


def test_help_lists_what_each_command_is_for(capsys: Capture) -> None:
    """The same, whether its module is imported or not."""
    assert parser().format_help() == parser([]).format_help() == parser(["verify"]).format_help()
    for name, summary in COMMANDS.items():
        assert summary.split()[0] in parser([]).format_help()
        assert hasattr(command(name), "run")


def test_help_and_a_list_take_little() -> None:
    """Help makes some 22,000 calls of functions, and a list of two archives 560,000, most of them in rich."""
    assert calls_of("--help") < 40_000
    assert calls_of("inspect") < 1_500_000


@pytest.mark.parametrize("words", [["doctor", "--for", "H100"], ["explain", "linear_scan"]])
def test_a_mistyped_flag_is_one_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SCAN_REGISTRY_LOG", "inf")
    more = ["--dtype", "fp32", "--shape", "2,3,4"] if words[0] == "explain" else []
    assert main([*words, *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("scan-registry: error: SCAN_REGISTRY_LOG is 'inf'; accepted are info, ")
    assert error.endswith("; did you mean info?\n")


def test_explain_refuses_a_mistyped_level(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU, too, as the call does."""
    monkeypatch.setenv(policy.VARIABLE, "aott")
    policy._default.cache_clear()
    words = ["linear_scan", "--dtype", "fp32", "--shape", "2,3,4", "--device", "cpu"]
    try:
        assert main(["explain", *words]) == 2
    finally:
        policy._default.cache_clear()
    assert capsys.readouterr().err.endswith("; did you mean aot?\n")
