"""What the nightly run changes outside its checkout: branches, issues and pull requests, through git and gh."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WHO = {"NAME": "github-actions[bot]", "EMAIL": "41898282+github-actions[bot]@users.noreply.github.com"}


def _credentials() -> dict[str, str]:
    """Environment in which gh answers git for its token, where it has one; the checkout keeps none."""
    if not os.environ.get("GH_TOKEN"):
        return {}
    return {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "credential.helper",
            "GIT_CONFIG_VALUE_0": "!gh auth git-credential"}  # fmt: skip


@dataclass(frozen=True)
class Forge:
    """A checkout and the place it was cloned from.

    Args:
        checkout: the working tree.
        apply: whether to write outside of it; else only what would be done is said.
    """

    checkout: Path
    apply: bool

    def _run(
        self,
        command: Sequence[str],
        given: str | None = None,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> bytes:
        done = subprocess.run(
            command, cwd=cwd or self.checkout, input=None if given is None else given.encode(), stdout=subprocess.PIPE,
            check=True, env=os.environ | (env or {}),
        )  # fmt: skip
        return done.stdout

    def git(self, *arguments: str, **env: str) -> str:
        """What git prints.

        Raises:
            subprocess.CalledProcessError: it failed; it has said why on standard error.
        """
        return self._run(["git", *arguments], env=env).decode().strip()

    def gh(self, *arguments: str, given: str | None = None) -> str:
        """What gh prints, ``given`` on its standard input.

        Raises:
            FileNotFoundError: gh is not installed.
            subprocess.CalledProcessError: it failed; it has said why on standard error.
        """
        return self._run(["gh", *arguments], given).decode().strip()

    def would(self, what: str) -> bool:
        """Whether to do it; says so, or that it would be done."""
        sys.stdout.write(f"{what}\n" if self.apply else f"--apply would: {what}\n")
        return self.apply

    def tip(self, branch: str) -> str | None:
        """The commit that the branch is at, fetched from origin; None where it is not there."""
        if not self.git("ls-remote", "--heads", "origin", f"refs/heads/{branch}", **_credentials()):
            return None
        self.git("fetch", "--quiet", "--no-tags", "origin", f"refs/heads/{branch}", **_credentials())
        return self.git("rev-parse", "FETCH_HEAD")

    def extract(self, commit: str, folder: Path) -> None:
        """Write the files of a commit below ``folder``."""
        with tarfile.open(fileobj=io.BytesIO(self._run(["git", "archive", "--format=tar", commit]))) as archive:
            # Pythons before 3.11.4 have no filters; ours is a commit of this repository.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(folder)

    def commit(self, files: Path, paths: Iterable[str], start: str | None, parent: str | None, message: str) -> str:
        """Make a commit of ``start``'s files with those at ``paths`` below ``files`` in their place; its hash.

        Neither branch nor index of the checkout is touched.
        """
        identity = {f"GIT_{role}_{what}": value for role in ("AUTHOR", "COMMITTER") for what, value in WHO.items()}
        with tempfile.TemporaryDirectory() as folder:
            index = {
                "GIT_INDEX_FILE": str(Path(folder, "index")),
                "GIT_DIR": self.git("rev-parse", "--absolute-git-dir"),
            }
            self.git(*(("read-tree", start) if start else ("read-tree", "--empty")), **index)
            add = ["git", "--work-tree", str(files), "add", "--all", "--force", "--", *paths]
            self._run(add, env=index, cwd=files)  # paths are below where git runs
            tree = self.git("write-tree", **index)
        return self.git("commit-tree", tree, *(("-p", parent) if parent else ()), "-m", message, **identity)

    def same_files(self, commit: str, other: str | None) -> bool:
        """Whether two commits hold the same."""
        return other is not None and len({self.git("rev-parse", f"{one}^{{tree}}") for one in (commit, other)}) == 1

    def push(self, commit: str, branch: str, *, force: bool = False) -> None:
        """Put the branch at ``commit``."""
        forced = ("--force",) if force else ()
        self.git("push", "--quiet", *forced, "origin", f"{commit}:refs/heads/{branch}", **_credentials())

    def issue(self, marker: str, title: str, body: str, label: str) -> None:
        """Open an issue, or update the open one whose text holds ``marker``."""
        known = next((one for one in self.open_issues(label) if marker in (one["body"] or "")), None)
        text = f"{body}\n\n{marker}\n"
        if known is not None and known["body"].strip() == text.strip() and known["title"] == title:
            sys.stdout.write(f"issue {known['number']} says it already: {title}\n")
        elif known is not None:
            if self.would(f"update issue {known['number']}: {title}"):
                self.gh("issue", "edit", str(known["number"]), "--title", title, "--body-file", "-", given=text)
        elif self.would(f"open an issue: {title}"):
            self.gh("label", "create", label, "--force", "--description", "Found by the performance history")
            self.gh("issue", "create", "--title", title, "--label", label, "--body-file", "-", given=text)

    def open_issues(self, label: str) -> list[dict[str, Any]]:
        """Number, title and body of every open issue with the label; none in a dry run."""
        return self._open("issue", "--label", label, "--limit", "1000")

    def close_issue(self, number: int, title: str, comment: str) -> None:
        """Close an issue with a comment."""
        if self.would(f"close issue {number}: {title}"):
            self.gh("issue", "close", str(number), "--comment", comment)

    def close_pull_request(self, branch: str, comment: str) -> None:
        """Close the open pull request of the branch, if there is one, with a comment; the branch stays."""
        for one in self._open("pr", "--head", branch):
            if self.would(f"close pull request {one['number']}: {one['title']}"):
                self.gh("pr", "close", str(one["number"]), "--comment", comment)

    def pull_request(self, branch: str, title: str, body: str) -> None:
        """Open a pull request of the branch into main, or update the open one."""
        known = self._open("pr", "--head", branch)
        if known:
            if self.would(f"update pull request {known[0]['number']}: {title}"):
                self.gh("pr", "edit", str(known[0]["number"]), "--title", title, "--body-file", "-", given=body)
        elif self.would(f"open a pull request: {title}"):
            self.gh(
                "pr", "create", "--head", branch, "--base", "main", "--title", title, "--body-file", "-", given=body
            )

    def _open(self, kind: str, *filters: str) -> list[dict[str, Any]]:
        """Open issues or pull requests; none where nothing is written, so that a dry run needs no gh."""
        if not self.apply:
            return []
        return json.loads(self.gh(kind, "list", "--state", "open", "--json", "number,title,body", *filters) or "[]")
