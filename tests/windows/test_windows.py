"""`qhx` for x86-64 Windows under Wine. `cargo xtask windows` builds the program, and says where all is:

QHX         the program of this machine, which makes the bundle
BUILT       the folder of what was built for Windows
WINELOADER, WINESERVER
            Wine and its server
"""

import json
import os
import pathlib
import pty
import re
import shutil
import signal
import subprocess
import unittest

from wine import CHECKOUT, ENVIRONMENT, PATIENCE, PREFIX, ROOT, WINE, start, stop

# The checkpoint of the bundle, and what its reference answers begin with.
FIXTURE = CHECKOUT / "tests/fixtures/llama3-tiny"
PROMPT = "The capital of France is"

# The current folder of all runs: its name, the program's and the bundle's are hard to get right.
FOLDER = ROOT / "Äpfel & Öl"
PROGRAM = FOLDER / "Programm Ordner/qhx.exe"
PLUGIN = "qhx_ops_llama_plugin.dll"
BUNDLE = "Bündel für alle"
LONG = ["generate", BUNDLE, PROMPT, "--max-new", "200", "--ignore-eos"]

QHX = os.environ["QHX"]


def run(*command, env=ENVIRONMENT, **more):
    return subprocess.run(command, cwd=FOLDER, env=env, timeout=PATIENCE, **more)


def setUpModule():
    shutil.rmtree(FOLDER, ignore_errors=True)
    malformed = FOLDER / "malformed"
    for folder in (PROGRAM.parent, malformed):
        folder.mkdir(parents=True, exist_ok=True)
    start()
    built = pathlib.Path(os.environ["BUILT"])
    shutil.copy(built / "qhx.exe", PROGRAM)
    shutil.copy(built / PLUGIN, PROGRAM.parent)
    shutil.copy(built / "examples/crash_on_load.dll", malformed)
    (malformed / "text.dll").write_text("no library\n")
    forge = [QHX, "forge", "--cpu-only", "--out", BUNDLE, FIXTURE]
    run(*forge, check=True, stdout=subprocess.DEVNULL)


def tearDownModule():
    stop()


def undrawn(text):
    """Text without the sequences that draw on a console and without line ends, of which it makes some of its own."""
    return re.sub(r"\x1b[^A-Za-z]*[A-Za-z]|[\r\n]", "", text.decode(errors="replace"))


class Windows(unittest.TestCase):
    def expect(self, ran, code, says=()):
        """Output of a run with this exit code, whose streams together contain all of these texts."""
        both = f"\n--- stdout\n{ran.stdout.decode(errors='replace')}\n--- stderr\n{ran.stderr.decode(errors='replace')}"
        self.assertEqual(ran.returncode, code, both)
        for part in says:
            self.assertIn(part, both)
        # The form of paths that Windows's own functions return is for nobody to read.
        self.assertFalse(says and r"\\?" "\\" in both, both)
        return ran.stdout.decode(errors="replace")

    def qhx(self, *arguments, code=0, says=(), reads=""):
        ran = run(WINE, PROGRAM, *arguments, input=reads.encode(), capture_output=True)
        return self.expect(ran, code, says)

    def console(self, arguments, interrupt_after=None):
        """A run on a console, which Wine draws on a terminal; with Ctrl-C when a text was printed."""

        def hung(*_):
            os.kill(process, signal.SIGKILL)

        process, terminal = pty.fork()
        if process == 0:
            os.chdir(FOLDER)
            os.execvpe(WINE, [WINE, str(PROGRAM), *arguments], ENVIRONMENT)
        signal.signal(signal.SIGALRM, hung)
        signal.alarm(PATIENCE)
        seen = b""
        while True:
            try:
                piece = os.read(terminal, 4096)
            except OSError:
                # The program has ended.
                break
            seen += piece
            if interrupt_after and interrupt_after in undrawn(seen):
                os.write(terminal, b"\x03")
                interrupt_after = None
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        signal.alarm(0)
        os.close(terminal)
        return subprocess.CompletedProcess(arguments, code, undrawn(seen).encode(), b"")

    def test_help_and_the_report_of_the_doctor(self):
        self.qhx("--help", says=["Usage: qhx", "generate"])
        report = self.qhx("doctor", says=[
            "ok      platform     windows x86_64",
            "ok      cpu backend",
            "missing qnn backend",
            "llama_generate",
            "Äpfel & Öl\\Programm Ordner\\" + PLUGIN,
            "ok      cache folder",
        ])
        # What the libraries are called elsewhere is of no use here.
        self.assertNotIn(".so", report)

    def test_libraries_that_cannot_be_opened(self):
        names = ["QnnHtp.dll", "QnnSystem.dll"]
        self.addCleanup(lambda: [(FOLDER / name).unlink() for name in names])
        for name in names:
            (FOLDER / name).write_text("version https://git-lfs.github.com/spec/v1\n")
        self.qhx("doctor", "--htp", "QnnHtp.dll", code=1, says=[
            "BROKEN  qnn backend  Qnn",
            ".dll: not a shared library (no PE header)",
            "Git LFS pointer",
        ])
        on_npu = ["generate", BUNDLE, PROMPT, "--backend", "qnn", "--htp"]
        says = [r"error: nirgends\Qnn", "give the path of the file QnnHtp.dll"]
        self.qhx(*on_npu, r"nirgends\QnnHtp.dll", code=5, says=says)
        # A library of Windows's own is one, and none of Qualcomm's.
        shutil.copy(PROGRAM.with_name(PLUGIN), FOLDER / "QnnSystem.dll")
        says = ["QnnSystem.dll: not a QNN library of the expected kind", "give QnnHtp.dll"]
        self.qhx(*on_npu, "QnnSystem.dll", code=5, says=says)

    def test_what_a_bundle_is_made_of(self):
        self.qhx("inspect", BUNDLE, says=["llama_generate", BUNDLE])
        self.qhx("verify", BUNDLE)
        self.qhx("inspect", r"C:\gibt es nicht", code=3, says=[r"error: C:\gibt es nicht: "])

    def test_greedy_answers_are_those_of_the_reference(self):
        report = json.loads(self.qhx("verify", BUNDLE, f"Z:{FIXTURE}/suite.json", "--json"))
        self.assertTrue(report["cases"])
        self.assertEqual((report["passed"], report["gate"]), (True, "greedy_exact"), report)

    def test_the_text_is_that_of_this_machine(self):
        command = ["generate", BUNDLE, PROMPT, "--backend", "cpu"]
        here = run(QHX, *command, stdout=subprocess.PIPE).stdout.decode()
        self.assertTrue(here)
        self.assertEqual(self.qhx(*command), here)
        # Absolute, with the slashes of the other systems, and from standard input.
        again = self.qhx("generate", f"Z:{FOLDER}/{BUNDLE}", "-", reads=f"{PROMPT}\r\n")
        self.assertEqual(again, here)

    def test_a_user_whose_name_is_of_other_scripts(self):
        """Home, cache, program, plugin, checkpoint and bundle: all below a folder with such a name."""
        home = ROOT / "Bjørn Åse 漢字 ½"
        shutil.rmtree(home, ignore_errors=True)
        program = home / "AppData/Local/Programs/qhx.exe"
        program.parent.mkdir(parents=True)
        for file in (PROGRAM, PROGRAM.with_name(PLUGIN)):
            shutil.copy(file, program.parent)
        shutil.copytree(FIXTURE, home / "模型")
        user = f"Z:{home}".replace("/", "\\")
        # Wine starts programs with the folders of its own user; its command processor changes them.
        folders = {
            "USERPROFILE": user,
            "APPDATA": rf"{user}\AppData\Roaming",
            "LOCALAPPDATA": rf"{user}\AppData\Local",
            "HOME": user,
        }
        environment = {name: value for name, value in ENVIRONMENT.items() if name != "QHX_CACHE_DIR"}
        set_folders = [word for pair in folders.items() for word in ("set", "=".join(pair), "&&")]

        def qhx(*arguments, code=0, says=()):
            command = [WINE, "cmd", "/c", *set_folders, f"{user}\\AppData\\Local\\Programs\\qhx.exe"]
            ran = run(*command, *arguments, env=environment, capture_output=True)
            return self.expect(ran, code, says)

        qhx("doctor", says=[
            rf"ok      cache folder {user}\AppData\Local\qhx",
            rf"{user}\AppData\Local\Programs\{PLUGIN}",
        ])
        bundle = rf"{user}\バンドル für Åse"
        qhx("forge", "--cpu-only", "--out", bundle, rf"{user}\模型")
        command = ["generate", bundle, PROMPT, "--backend", "cpu"]
        here = run(QHX, "generate", home / "バンドル für Åse", *command[2:], stdout=subprocess.PIPE)
        self.assertTrue(here.stdout)
        self.assertEqual(qhx(*command), here.stdout.decode())
        suite = json.loads(qhx("verify", bundle, rf"{user}\模型\suite.json", "--json"))
        self.assertEqual((suite["passed"], suite["gate"]), (True, "greedy_exact"), suite)
        qhx("plugins", "install", rf"{user}\AppData\Local\Programs\{PLUGIN}")
        qhx("plugins", "verify", says=["ok", PLUGIN])
        self.assertEqual(len(list((home / "AppData/Roaming").rglob(PLUGIN))), 1)
        library = rf"{user}\ライブラリ\QnnHtp.dll"
        says = [rf"error: {user}\ライブラリ\Qnn", "give the path of the file QnnHtp.dll"]
        qhx(*command[:3], "--backend", "qnn", "--htp", library, code=5, says=says)

    def test_a_conversation(self):
        answers = self.qhx("chat", BUNDLE, "--max-new", "4", "--json", reads="Hallo\r\nÄpfel\r\n")
        self.assertEqual(answers.count('"finish_reason"'), 2, answers)

    def test_a_reader_that_leaves(self):
        pipe = subprocess.PIPE
        command = [WINE, PROGRAM, *LONG]
        with subprocess.Popen(
            command, cwd=FOLDER, env=ENVIRONMENT, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0
        ) as child:
            self.assertTrue(child.stdout.read(1))
            child.stdout.close()
            # Nobody reads on, and that is no failure.
            errors = child.stderr.read().decode(errors="replace")
            self.assertEqual(child.wait(PATIENCE), 0, errors)
        self.assertNotIn("error", errors)

    def test_text_on_a_console(self):
        ran = self.console(["generate", BUNDLE, PROMPT])
        # In a code page that is not UTF-8 this would be something else.
        self.expect(ran, 0, ["A small café there opens at seven"])

    def test_ctrl_c_on_a_console(self):
        self.expect(self.console(LONG, interrupt_after="Paris"), 130, ["Paris", "finish: cancelled"])

    def test_installed_plugins_are_locked(self):
        def installed():
            users = os.walk(PREFIX / "drive_c/users")
            return [pathlib.Path(folder, PLUGIN) for folder, _, files in users if PLUGIN in files]

        # Twice: a file that was installed is replaced.
        for _ in range(2):
            self.qhx("plugins", "install", rf"Programm Ordner\{PLUGIN}")
        self.qhx("plugins", "list", "--json")
        [file] = installed()
        self.qhx("plugins", "verify", says=["ok", PLUGIN])
        self.qhx("generate", BUNDLE, PROMPT, "--max-new", "1")
        with file.open("ab") as plugin:
            plugin.write(b"\0")
        self.qhx("plugins", "verify", code=1, says=["changed since it was installed"])
        self.qhx("plugins", "remove", "qhx_ops_llama_plugin")
        self.assertEqual(installed(), [])

    def test_plugins_that_crash_or_are_none(self):
        self.qhx("--plugin-dir", "malformed", "doctor", code=1, says=[
            r"malformed\crash_on_load.dll: not loaded: loading it ended the process that tried it (exit code 0xc",
            r"malformed\text.dll: cannot be loaded as a dynamic library",
            "llama_generate",
        ])
        # The others work all the same.
        self.qhx("--plugin-dir", "malformed", "generate", BUNDLE, PROMPT, "--max-new", "1")
        install = ["plugins", "install", r"malformed\crash_on_load.dll"]
        self.qhx(*install, code=8, says=["not installed: "])
