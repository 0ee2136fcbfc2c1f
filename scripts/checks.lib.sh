# checks.lib.sh - shared by scripts/checks/*; sourced.

# python_with PACKAGE...: an interpreter that has them: $PYTHON, or one of a virtual environment that is made in build/.
python_with() {
    local venv=build/venv-clients imports
    imports=$(printf ', %s' "$@")
    if [ -z "${PYTHON:-}" ]; then
        PYTHON=$venv/bin/python
        [ -x "$PYTHON" ] || python3 -m venv "$venv"
        "$PYTHON" -c "import ${imports#, }" 2>/dev/null || "$PYTHON" -m pip install --quiet "$@"
    fi
    echo "$PYTHON"
}
