"""What the files for Docker, Compose and systemd say fits the server, and so does the page beside them."""

import argparse
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from trt_spec.runtime.grammars import trials
from trt_spec.runtime.state.asked import DEFAULT_DRAFT_LENGTH
from trt_spec.tools.cli import COMMANDS, described_by
from trt_spec.tools.commands import export_models
from trt_spec.tools.flags.limits import UNITS
from trt_spec.tools.measuring import load
from trt_spec.tools.program import EXIT_ERROR, EXIT_TERMINATED, Parser
from trt_spec.tools.serving import connections, errors, guard, server, stepper
from trt_spec.tools.serving.access_log import CLIENT_GONE, QUIET

from ...kit.bundles import Pair
from .conftest import Served, serving
from .manifests import (
    DEPLOY,
    PAGE,
    health_check,
    instruction,
    instructions,
    read_yaml,
    seconds,
    served_by,
    table,
    unit,
)

ROOT = Path(__file__).parents[3]
FILES = ("Dockerfile", "compose.yaml", "trt-spec.service")
TO_END = stepper.CANCEL_SECONDS + server.LINGER_SECONDS + stepper.JOIN_SECONDS  # after a drain, at most


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = Parser(prog=command)
    described_by(command).add_arguments(parser)
    return parser


def parser_of_load() -> argparse.ArgumentParser:
    parser = Parser(prog="load")
    load.add_arguments(parser)
    return parser


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings}


def arguments_of(file: str) -> argparse.Namespace:
    command, *words = served_by()[file]
    assert command == "serve"
    return parser_of("serve").parse_args(words)


def compose() -> dict:
    return read_yaml("compose.yaml")["services"]["server"]


# The commands.


@pytest.mark.parametrize("file", FILES)
def test_the_server_is_started_with_flags_that_there_are(file: str):
    arguments = arguments_of(file)
    assert (arguments.port, arguments.log_format) == (8000, "json")
    assert arguments.host == ("127.0.0.1" if file == "trt-spec.service" else "0.0.0.0")


def test_compose_and_systemd_start_the_same_server_from_the_same_places():
    one, other = arguments_of("compose.yaml"), arguments_of("trt-spec.service")
    same = ("max_batch", "max_waiting", "cache_memory", "prefix_memory", "drain_seconds", "engine")
    assert [getattr(one, name) for name in same] == [getattr(other, name) for name in same]
    [volume], keys = compose()["volumes"], read_yaml("compose.yaml")["secrets"]["keys"]["file"]
    assert volume == f"{other.bundle}:{one.bundle}:ro"
    assert str(one.bundle) == str(arguments_of("Dockerfile").bundle)
    assert str(one.api_key_file) == f"/run/secrets/{compose()['secrets'][0]}"
    assert unit()["LoadCredential"] == [f"keys:{keys}"]
    assert str(other.api_key_file) == "${CREDENTIALS_DIRECTORY}/keys"
    for place in (str(other.bundle.parent), keys):
        assert f" {place}" in PAGE


@pytest.mark.parametrize("file", ["compose.yaml", "trt-spec.service"])
def test_whoever_stops_the_server_waits_until_it_has_drained(file: str):
    wait = compose()["stop_grace_period"] if file == "compose.yaml" else unit()["TimeoutStopSec"][0]
    assert seconds(wait) > arguments_of(file).drain_seconds + TO_END
    text, said = (DEPLOY / file).read_text(), " ".join(PAGE.split())
    assert f"the {TO_END:g} s that the end itself may take" in text
    assert f"{seconds(wait):g} s in these files" in said
    assert f"up to {TO_END:g} s to end" in said
    assert f"`terminationGracePeriodSeconds` is {seconds(wait):g}" in said


@pytest.mark.parametrize("file", ["compose.yaml", "trt-spec.service"])
def test_as_many_files_may_be_open_as_the_server_asks_for(file: str):
    found = compose()["ulimits"]["nofile"] if file == "compose.yaml" else unit()["LimitNOFILE"][0]
    assert int(found) == connections.WANTED_FILES


def test_caches_and_prefixes_leave_half_of_the_containers_memory_to_weights_and_copies():
    arguments = arguments_of("compose.yaml")
    limit = int(compose()["mem_limit"].removesuffix("g")) * UNITS["GiB"]
    assert 2 * arguments.cache_memory + arguments.prefix_memory < 0.6 * limit
    assert compose()["memswap_limit"] == compose()["mem_limit"]


# The image.


def test_the_image_has_no_root_no_shell_between_and_the_port_of_the_server():
    user, group = instruction("USER").split(":")
    assert int(user) == int(group) > 0
    assert f"-o {user} keys" in PAGE
    assert instruction("EXPOSE") == "8000"
    assert instruction("STOPSIGNAL") == "SIGTERM"
    assert instruction("ENTRYPOINT") == '["trt-spec"]'
    assert compose()["ports"] == ["127.0.0.1:8000:8000"]


def test_the_image_takes_all_that_the_wheel_is_made_of_and_is_pinned():
    copied = {word for name, said in instructions() if name == "COPY" for word in said.split()[:-1]}
    assert {"engines", "export", "runtime", "tools", ".package", "pyproject.toml", ".ci/constraints.txt"} < copied
    sources = [ROOT / word for word in copied if not word.startswith(("--", "/"))]
    assert [str(one) for one in sources if not one.exists()] == []
    install = next(said for name, said in instructions() if "pip install" in said)
    assert '-c constraints.txt "/source[${EXTRAS}]"' in install
    extras = next(said for name, said in instructions() if said.startswith("EXTRAS=")).partition("=")[2]
    assert f"'.[{extras}]'" in PAGE, "systemd's environment has the same"
    known = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(extras.split(",")) <= set(known)


def test_compose_builds_this_image_from_the_clone():
    build = compose()["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert context == ROOT
    assert context / build["dockerfile"] == DEPLOY / "Dockerfile"
    arguments = {said.partition("=")[0] for name, said in instructions() if name == "ARG"}
    assert set(build["args"]) <= arguments
    assert compose()["read_only"] is True
    [(_, home)] = re.findall(r"(^| )HOME=(\S+)", instruction("ENV"))
    assert compose()["tmpfs"] == [home]
    assert unit()["Environment"] == [f"HOME={home}"]


def check_health(port: int, patience: float = 4) -> subprocess.CompletedProcess[str]:
    """Ask as the image does, but at another port."""
    name, flag, code = health_check()
    assert name == "python"
    assert code.count("8000") == code.count("timeout=4") == 1
    code = code.replace("8000", str(port)).replace("timeout=4", f"timeout={patience}")
    return subprocess.run([sys.executable, flag, code], capture_output=True, text=True)


def test_the_health_check_needs_no_key_and_fails_while_the_server_drains(llama: Pair):
    with serving(llama, keys=["secret"]) as served:
        port = int(served.url.rpartition(":")[2])
        assert check_health(port).returncode == 0
        served.service.stepper.draining = True
        assert check_health(port).returncode == 1
        served.service.stepper.draining = False
        assert check_health(port).returncode == 0
    assert check_health(port).returncode == 1, "nobody listens there any more"


def test_the_health_check_fails_at_a_server_that_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = check_health(listener.getsockname()[1], patience=0.2)
    assert found.returncode == 1
    assert "timed out" in found.stderr


# The unit.


def test_systemd_starts_again_what_failed_and_not_what_was_told_to_end():
    found = unit()
    assert found["Restart"] == ["on-failure"]
    assert found["SuccessExitStatus"] == [str(EXIT_TERMINATED)]
    assert (found["KillSignal"], found["KillMode"]) == (["SIGTERM"], ["mixed"])
    assert found["RestartPreventExitStatus"] == [str(EXIT_ERROR)]
    text = (DEPLOY / "trt-spec.service").read_text()
    assert f"{EXIT_ERROR}: a flag, the bundle or the port is wrong" in text
    assert f"{server.BROKEN}: the decoder has failed" in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_understands_the_unit_and_finds_it_little_exposed(tmp_path: Path):
    file, start = tmp_path / "trt-spec.service", unit()["ExecStart"][0].split()[0]
    file.write_text((DEPLOY / file.name).read_text().replace(start, sys.executable))
    found = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
    found = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=20", file], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout


# The alarms.


def rules() -> dict[str, dict]:
    [group] = read_yaml("alerts.yaml")["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_every_metric_that_is_asked_for_is_counted(served: Served):
    served.post("/v1/completions", {"prompt": "abc", "max_tokens": 12, "temperature": 0, "draft_length": 4})
    lines = served.http.get("/metrics").text.splitlines()
    known = {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}
    asked = {name for rule in rules().values() for name in re.findall(r"\w+:\w+", rule["expr"])}
    assert len(asked) > 8
    assert asked - known == set()
    named = set(re.findall(r"(?:vllm|trt_spec):\w+", PAGE))
    assert {name for name in named if name not in known and f"{name}_bucket" not in known} == set()


def test_the_page_says_of_every_alarm_when_it_fires_and_what_to_do():
    rows = {name.strip("`"): (when, what) for name, when, what in table("alarm | fires when | what to do")}
    assert list(rows) == list(rules())
    for name, rule in rules().items():
        when, what = rows[name]
        assert what
        first = re.search(r"\w+:\w+|up", rule["expr"])[0].removesuffix("_bucket")
        assert f"`{first}`" in when
        lasts = rule.get("for") or re.search(r"\[(\w+)\]", rule["expr"])[1]
        assert f" {lasts}" in when
        *_, threshold = re.findall(r"[<>=]=? ([\d.]+)", rule["expr"])
        assert f" {threshold}" in when or threshold == "0", name


def test_thresholds_lie_within_the_limits_of_the_server():
    most = parser_of("serve").get_default("max_waiting")
    over = int(re.search(r"> (\d+)", rules()["TrtSpecQueueIsNearlyFull"]["expr"])[1])
    assert most / 2 < over < most
    assert "--max-waiting" not in " ".join(served_by()["compose.yaml"])


def test_the_page_configures_prometheus_for_these_rules():
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    config = yaml.safe_load(text)
    [job] = config["scrape_configs"]
    assert f'job="{job["job_name"]}"' in rules()["TrtSpecIsDown"]["expr"]
    assert [(DEPLOY / name).name for name in config["rule_files"]] == ["alerts.yaml"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]


def test_acceptance_is_watched_as_the_page_defines_it():
    first = table("what | expression")[0][1].strip("`")
    assert rules()["TrtSpecAcceptanceFell"]["expr"].startswith(first)


# The page.


def test_every_command_of_the_page_is_one():
    commands = [
        line.strip() for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
    ]
    commands += re.findall(r"`((?:trt-spec|python -m) [^`]*)`", PAGE)
    ran = 0
    for command in commands:
        words = shlex.split(command, comments=True)
        if words[:1] == ["trt-spec"] and len(words) > 2:
            assert words[1] in COMMANDS
            parser_of(words[1]).parse_args(words[2:])
            ran += 1
        elif words[:3] == ["python", "-m", "trt_spec.tools.measuring.load"]:
            parser_of_load().parse_args(words[3:])
            ran += 1
    assert ran >= 8


def test_every_flag_that_the_page_names_is_one():
    others = {"--build", "--detach", "--wait", "--now", "--no-log-prefix", "--unit", "--output", "--rm", "--user"}
    known = others.union(*(flags_of(parser_of(name)) for name in ("serve", "inspect", "bench", "verify")))
    known |= flags_of(parser_of_load()) | flags_of(export_models._parser())
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) - known == set()


def test_every_limit_of_the_page_is_the_servers_own():
    serve = parser_of("serve")
    expected = {
        f"come back in {errors.RETRY_AFTER_SECONDS} s": f"{serve.get_default('max_batch')} requests are live and "
        f"{serve.get_default('max_waiting')} wait",
        "busy": f"for {trials.WAIT_SECONDS:g} s",
        "all bodies": f"more than {guard.MOST_HELD_BYTES // 2**20} MiB",
        "shutting_down": f"for {serve.get_default('drain_seconds'):g} s at most",
        "body_too_large": f"more than {guard.MOST_BODY_BYTES // 2**20} MiB",
        "headers": f"more than {connections.HEADER_SECONDS:g} s, or the body more than {connections.BODY_SECONDS:g} s",
        "took nothing": f"of its answer for {connections.TAKE_SECONDS:g} s",
        "files": f"less {connections.OTHER_FILES}",
    }
    rows = [" | ".join(row) for row in table("status, code | why | what sets it")]
    for name, said in expected.items():
        assert any(name in row and said in row for row in rows), name
    said = " ".join(PAGE.split())
    assert f"answers 503 after {stepper.STUCK_SECONDS} s" in said
    assert f"with a seed keeps {DEFAULT_DRAFT_LENGTH}," in said
    assert f"Status {CLIENT_GONE} means" in said
    assert all(f"`{path}`" in PAGE for path in (*QUIET, *guard.OPEN))


def test_every_code_of_the_page_is_one_that_the_server_says():
    source = "".join(file.read_text() for file in Path(server.__file__).parent.glob("*.py"))
    for said, *_ in table("status, code | why | what sets it"):
        for status, code in re.findall(r"(\d{3}) `(\w+)`", said):
            assert f'"{code}"' in source
            assert int(status) in errors.TYPES


def test_every_exit_code_of_the_page_is_the_servers():
    codes = [int(code) for code, *_ in table("exit code | meaning | started again, unless it was stopped")]
    killed = 128 + 9
    assert codes == [0, EXIT_ERROR, server.BROKEN, killed, EXIT_TERMINATED]
