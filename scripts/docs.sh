#!/usr/bin/env bash
# Build the documentation into site/; a broken link or anchor is an error.
#
#   bash scripts/docs.sh
#   python3 -m http.server --directory site --bind 127.0.0.1        then open http://127.0.0.1:8000
#
# Sets up .venv-docs by itself; torch is not needed. Arguments are passed to mkdocs build.
set -eu
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
VENV="$VENV-docs"
create_environment
once "$VENV" "$REQUIREMENTS/docs.txt" install_file
cd "$ROOT"

# Silence the theme's warning about a future mkdocs: the version is pinned.
NO_MKDOCS_2_WARNING=1 "$VENV/bin/python" -m mkdocs build --config-file .mkdocs.yml --strict --site-dir site "$@"

if grep -rEn --include='*.html' '<(script|link|img|iframe)[^>]+(src|href)="(https?:)?//' site; then
    echo "The pages above load something from elsewhere." >&2
    exit 1
fi
