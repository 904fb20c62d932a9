"""Windows as Wine imitates it, in which programs for x86-64 Windows run: WINELOADER and WINESERVER are its programs."""

import os
import pathlib
import subprocess

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
ROOT = pathlib.Path(os.environ.get("QHX_WINE", CHECKOUT / "target/wine"))
# Kept from run to run.
PREFIX = ROOT / "prefix"
# A run that takes longer has hung.
PATIENCE = 120

WINE, SERVER = (os.environ[name] for name in ("WINELOADER", "WINESERVER"))
OF_THE_USER = {"DISPLAY", "QHX_QNN_HTP", "QHX_QNN_SYSTEM", "QHX_PLUGIN_PATH", "QHX_LOG"}
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in OF_THE_USER} | {
    "WINEPREFIX": str(PREFIX),
    # No window asks for .NET or a browser, and Wine does not report what it lacks.
    "WINEDLLOVERRIDES": "mscoree=;mshtml=",
    "WINEDEBUG": "-all",
    # Wine reads names of files as this says.
    "LC_ALL": "C.UTF-8",
    "QHX_CACHE_DIR": "cache",
}


def start():
    """Starts the server, and makes what programs need of Windows."""
    PREFIX.mkdir(parents=True, exist_ok=True)
    quiet = {"env": ENVIRONMENT, "timeout": PATIENCE, "check": True, "stdout": subprocess.DEVNULL}
    # The server would otherwise end with every run, and the next one would wait for a new one.
    subprocess.run([SERVER, f"--persistent={PATIENCE}"], **quiet)
    subprocess.run([WINE, "wineboot", "--init"], stderr=subprocess.DEVNULL, **quiet)
    # Wine 8 lacks it, and every program of Rust needs it.
    library = PREFIX / "drive_c/windows/system32/bcryptprimitives.dll"
    if not library.exists():
        source = pathlib.Path(__file__).with_name("bcryptprimitives.c")
        compiler = ["x86_64-w64-mingw32-gcc", "-shared", "-o", library, source, "-ladvapi32"]
        subprocess.run(compiler, **quiet)


def stop():
    """Ends the server, that of this prefix alone."""
    subprocess.run([SERVER, "--kill"], env=ENVIRONMENT, timeout=PATIENCE, stderr=subprocess.DEVNULL)
