"""
Check the external links of the pages, docstrings and notebooks: ``python docs/check_links.py``.

It prints each address that does not answer, with the files that have it, and exits with status 1
if there is one. It needs a network, so no test runs it; ``--list`` only lists the addresses.
"""

import argparse
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


def addresses() -> dict[str, list[str]]:
    """Return the external addresses of all tracked files, with the files that have them."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    result = defaultdict(list)
    for name in listed.stdout.splitlines():
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
    args = parser.parse_args()
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
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
