"""
Check the links of the pages, docstrings and notebooks: ``python docs/check_links.py``.

It prints each link to a file or a heading that does not exist, and each external address that does
not answer, with the files that have it, and exits with status 1 if there is one. External addresses
need a network, so tests run only the part of ``--offline``. ``--list`` lists these addresses.
"""

import argparse
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUFFIXES = (".md", ".py", ".ipynb", ".toml", ".cff", ".svg")
# Addresses that are names, and examples.
SKIPPED = re.compile(r"https?://(?:www\.w3\.org|localhost|127\.0\.0\.1|\{|\.\.\.)")
_ADDRESS = re.compile(r"https?://[^\s<>\"'`\\)\]}|]+")


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return listed.stdout.splitlines()


def prose(path: Path) -> str:
    """Return the Markdown of a page or a notebook, without blocks of code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "markdown"]
        text = "\n\n".join("".join(c["source"]) for c in cells)
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)


def anchors(path: Path) -> set[str]:
    """Return the addresses of the headings of a page, as in GitHub and on the site."""
    result: set[str] = set()
    for included in re.findall(r"^```\{include\} (\S+)$", path.read_text(encoding="utf-8"), re.M):
        result |= anchors(path.parent / included)
    for heading in re.findall(r"^#+ +(.*)$", prose(path), re.M):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        count = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", a) is not None for a in result)
        result.add(f"{slug}-{count}" if slug in result else slug)
    return result


def broken_links() -> list[str]:
    """Return the links between files of the repository whose file or heading does not exist."""
    result = []
    for name in tracked():
        path = ROOT / name
        if path.suffix not in (".md", ".ipynb"):
            continue
        for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
            file, _, anchor = link.partition("#")
            target = path.parent / file if file else path
            if re.match(r"[a-z]+:", link):
                continue
            if not target.exists():
                result.append(f"{name}: {link}")
            elif anchor and anchor not in anchors(target):
                result.append(f"{name}: {link} (no such heading)")
    return result


def addresses() -> dict[str, list[str]]:
    """Return the external addresses of all tracked files, with the files that have them."""
    result = defaultdict(list)
    for name in tracked():
        if not name.endswith(SUFFIXES) or name.startswith("docs/inventories"):
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        if name.endswith(".ipynb"):  # pictures are long lines without links
            text = re.sub(r'"image/png": "[^"]*"', "", text)
        for address in set(_ADDRESS.findall(text)):
            address = address.rstrip(".,;:*")
            if not SKIPPED.match(address):
                result[address.partition("#")[0]].append(name)
    return dict(result)


def failure(address: str, seconds: float = 20.0) -> str:
    """Return why an address does not answer; empty if it does."""
    # Some servers refuse clients without a name.
    headers = {"User-Agent": "Mozilla/5.0 (link check)"}
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=seconds):
            return ""
    except urllib.error.HTTPError as error:
        # The page exists, and is closed to programs.
        return "" if error.code in (401, 403, 405, 429) else f"status {error.code}"
    except (OSError, ValueError) as error:
        return str(error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--list", action="store_true", help="list the addresses, without a network")
    parser.add_argument("--offline", action="store_true", help="check only links between pages")
    args = parser.parse_args()
    if broken_pages := broken_links():
        print("\n".join(broken_pages))
    if args.offline:
        return int(bool(broken_pages))
    found = addresses()
    if args.list:
        print("\n".join(sorted(found)))
        return 0
    with ThreadPoolExecutor(8) as pool:
        reasons = dict(zip(found, pool.map(failure, found), strict=True))
    broken = {address: reason for address, reason in reasons.items() if reason}
    for address, reason in sorted(broken.items()):
        print(f"{address}: {reason} ({', '.join(sorted(set(found[address])))})")
    print(f"{len(found) - len(broken)} of {len(found)} addresses answer")
    return int(bool(broken or broken_pages))


if __name__ == "__main__":
    sys.exit(main())
