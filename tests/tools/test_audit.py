"""The audit of dependencies, with pip-audit and a server of advisories on this machine."""

import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tools import audit
from tools.audit import CONTROL_NAME, CONTROL_VERSION, NoAdvisoriesError, findings_of, main

CONTROL = (CONTROL_NAME, CONTROL_VERSION)
PIN = re.compile(r"^[\w.-]+==[\w.!+]+$")


@contextmanager
def advisories_for(*vulnerable, status=200):
    """Serve OSV's API with an advisory for each (name, version); yield pip-audit's options."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            query = json.loads(self.rfile.read(int(self.headers["content-length"])))
            name, version = query["package"]["name"], query["version"]
            asked.append((name, version))
            ranges = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.1"}]}]
            affected = [{"package": {"name": name, "ecosystem": "PyPI"}, "ranges": ranges}]
            found = {"vulns": [{"id": f"PYSEC-{name}", "affected": affected}]}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(found if (name, version) in vulnerable else {}).encode())

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1/query"
        yield ["--vulnerability-service", "osv", "--osv-url", url], asked
        server.shutdown()


@pytest.fixture
def pinned(tmp_path, monkeypatch):
    """Two pins in place of all."""
    pytest.importorskip("pip_audit", reason="needs pip-audit: pip install -e '.[dev]'")
    path = tmp_path / "constraints.txt"
    path.write_text("# comment\nJinja2==3.1.6\ngrafana-foundation-sdk==1769699998!10.1.0\n")
    monkeypatch.setattr(audit, "CONSTRAINTS", path)


def test_a_vulnerable_pin_fails_even_if_the_audit_is_optional(pinned, capsys):
    with advisories_for(CONTROL, ("jinja2", "3.1.6")) as (options, asked):
        assert main(["--if-available", *options]) == 1
    assert "jinja2 3.1.6: PYSEC-jinja2, fixed in 99.1" in capsys.readouterr().out
    assert sorted(asked) == [
        CONTROL,
        ("grafana-foundation-sdk", "1769699998!10.1.0"),
        ("jinja2", "3.1.6"),
    ]


def test_pins_without_advisories_pass(pinned, capsys):
    with advisories_for(CONTROL) as (options, _):
        assert main(options) == 0
    assert "0 findings" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("optional", "code", "status"), [([], 1, 200), (["--if-available"], 0, 503)]
)
def test_an_index_without_advisories_is_no_success(pinned, capsys, optional, code, status):
    with advisories_for(status=status) as (options, _):
        assert main([*optional, *options]) == code
    printed = capsys.readouterr().out
    assert "nothing was audited" in printed
    assert "findings" not in printed


def test_packages_that_could_not_be_looked_up_are_findings():
    found = {"name": CONTROL_NAME, "version": CONTROL_VERSION}
    vulns = [{"id": "PYSEC-1", "fix_versions": []}]
    skipped = {"name": "torch", "skip_reason": "not found"}
    report = {"dependencies": [{**found, "vulns": vulns}, skipped]}
    assert [str(each) for each in findings_of(report)] == ["torch: not found"]
    for control in ({**found, "vulns": []}, {"name": CONTROL_NAME, "skip_reason": "not found"}):
        with pytest.raises(NoAdvisoriesError, match=f"{CONTROL_NAME} "):
            findings_of({"dependencies": [control]})


def test_every_line_of_the_constraints_is_a_pin_and_none_is_the_control():
    lines = [each for each in Path("constraints.txt").read_text().splitlines() if each[:1] != "#"]
    assert len(lines) > 150
    assert [each for each in lines if not PIN.match(each)] == []
    assert not [each for each in lines if each.lower().startswith(f"{CONTROL_NAME}==")]
