"""The one thing pyproject.toml cannot say: a README for pages outside the repository, where relative links are dead."""

import re
from pathlib import Path

from setuptools import setup

ADDRESS = ""  # where the repository's files can be read; while it has no address, links become their text


def with_absolute_links(text: str) -> str:
    """Point links to files of the repository at its address, or leave their text alone where there is none."""
    target = rf"[\1]({ADDRESS}\2)" if ADDRESS else r"\1"
    return re.sub(r"\[([^\]]+)\]\((?!https?:)([^)]+)\)", target, text)


readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(long_description=with_absolute_links(readme), long_description_content_type="text/markdown")
