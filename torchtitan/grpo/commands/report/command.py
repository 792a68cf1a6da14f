# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Writes a page about one or more runs that needs no network, or serves it while they run."""

import argparse
import base64
import gzip
import hashlib
import importlib.util
import re
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from torchtitan.grpo.commands.report.content import Run
from torchtitan.grpo.system import strict_json
from torchtitan.grpo.system.errors import RunError
from torchtitan.grpo.system.files import write_whole

_SAMPLES, _EVALUATIONS = 1_400_000, 150_000
"""Compressed bytes of completions in a page, of all its runs."""
_EVERY_SECONDS = 5.0
_PAGE = Path(__file__).parent / "page"

_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}

Packed = dict[str, str]


def report(arguments: list[str]) -> int:
    given = _options().parse_args(arguments)
    steps = re.fullmatch(r"(\d+)(-?)(\d*)", given.steps)
    if steps is None:
        raise RunError(f"--steps must be a step or FIRST-LAST, such as 10-20, got {given.steps}.")
    span = int(steps[1]), int(steps[3] or (1 << 60 if steps[2] else steps[1]))
    runs = [Run(folder) for folder in given.runs]
    if given.watch:
        with Server(runs, span, given.port) as server, suppress(KeyboardInterrupt):
            print(f"{server.url} shows the run as it goes on. Ctrl-C ends this.", flush=True)
            server.serve_forever()
        return 0
    for run in runs:
        run.update()
    if given.json:
        contents = [run.content() for run in runs]
        told = [
            {key: content[key] for key in ("header", "advisories", "last")} for content in contents
        ]
        print(strict_json.dumps(told[0] if len(told) == 1 else told, indent=2))
        return 0
    file = given.output or runs[0].folder / "report.html"
    write_whole(file, page([packed(run, span, len(runs)) for run in runs]).encode())
    print(f"{file} ({file.stat().st_size / 1e6:.1f} MB) needs no network. Open it in a browser.")
    return 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchtitan-grpo report", description=__doc__)
    about = "the folder of a run (job.dump_folder); two or more are compared"
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help=about)
    parser.add_argument("-o", "--output", type=Path, help="FILE.html (default: RUN/report.html)")
    parser.add_argument(
        "--steps", default="0-", help="FIRST-LAST: steps whose completions are kept"
    )
    parser.add_argument("--json", action="store_true", help="print header, advisories, last values")
    parser.add_argument(
        "--watch", action="store_true", help="serve the page, and keep it up to date"
    )
    parser.add_argument("--port", type=int, default=0, help="port of --watch (default: a free one)")
    return parser


def packed(run: Run, steps: tuple[int, int], num_runs: int = 1) -> Packed:
    """Returns what the page holds of a run: compressed JSON as base64."""
    samples, kept = run.samples.pick(_SAMPLES // num_runs, *steps)
    evaluations, kept_too = run.evaluation_samples.pick(_EVALUATIONS // num_runs, *steps)
    core = run.content() | {"kept": {"samples": kept, "evaluations": kept_too}}
    text = strict_json.dumps(core, separators=(",", ":"), default=str)
    found = {"core": gzip.compress(text.encode(), mtime=0), "samples": samples}
    return {k: _base64(v) for k, v in {**found, "evaluations": evaluations}.items()}


def page(runs: Sequence[Packed], every_seconds: float | None = None) -> str:
    """Returns the page of packed runs, which asks for new content if ``every_seconds`` is given."""
    held = {f"{name}-{i}": text for i, run in enumerate(runs) for name, text in run.items()}
    held["plotly"] = _base64(gzip.compress(_plotly().read_bytes(), mtime=0))
    parts = {
        file.name: file.read_text(encoding="utf-8") for file in _PAGE.iterdir() if file.is_file()
    }
    parts |= {
        "nonce": secrets.token_urlsafe(16),
        "connect": "'none'" if every_seconds is None else "'self'",
        "watch": str(every_seconds or ""),
        "blocks": "\n".join(
            f'<script type="application/gzip" id="{name}">{text}</script>'
            for name, text in held.items()
        ),
    }
    return re.sub(r"\{\{([\w.]+)\}\}", lambda match: parts[match[1]], parts.pop("page.html"))


def _plotly() -> Path:
    """The file alone: to import the package would take longer than to write the page."""
    found = importlib.util.find_spec("plotly")
    for folder in (found.submodule_search_locations if found else None) or ():
        if (file := Path(folder) / "package_data/plotly.min.js").is_file():
            return file
    raise RunError(
        "A report needs plotly.min.js of the package plotly, got none: pip install plotly."
    )


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


class Server(ThreadingHTTPServer):
    """Serves a report on the loopback interface to those who know the path that ``url`` ends with."""

    daemon_threads = True

    def __init__(self, runs: Sequence[Run], steps: tuple[int, int], port: int) -> None:
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise RunError(
                f"--port must be free on 127.0.0.1, but {port} is not ({error.strerror}). Choose another, "
                "or leave --port out for a free one."
            ) from error
        self._runs, self._steps, self._lock = runs, steps, threading.Lock()
        self._sizes, self._held = list[object](), list[Packed]()
        self.path = f"/{secrets.token_urlsafe(24)}/"
        self.url = f"http://127.0.0.1:{self.server_port}{self.path}"

    def content(self) -> list[Packed]:
        with self._lock:
            if (sizes := [run.sizes() for run in self._runs]) != self._sizes:
                for run in self._runs:
                    run.update()
                self._held = [packed(run, self._steps, len(self._runs)) for run in self._runs]
                self._sizes = sizes
            return self._held


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        own = self.server
        # A page of another site that resolves its name to this machine has another Host.
        hosts = (f"127.0.0.1:{own.server_port}", f"localhost:{own.server_port}")
        place, _, name = self.path.rpartition("/")
        is_known = secrets.compare_digest(f"{place}/".encode(), own.path.encode())
        if self.headers.get("Host") not in hosts or not is_known or name not in ("", "data"):
            self._answer(403, b"")
            return
        held = own.content()
        body = (strict_json.dumps(held) if name else page(held, _EVERY_SECONDS)).encode()
        tag = f'"{hashlib.sha256(body).hexdigest()}"'
        is_old = self.headers.get("If-None-Match") == tag
        kind = "application/json" if name else "text/html; charset=utf-8"
        self._answer(304 if is_old else 200, b"" if is_old else body, kind, tag)

    def _answer(self, status: int, body: bytes, kind: str = "text/plain", tag: str = '""') -> None:
        self.send_response(status)
        about = {"Content-Type": kind, "Content-Length": str(len(body)), "ETag": tag}
        for name, value in (about | _HEADERS).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass
