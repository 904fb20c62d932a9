//! Assertions about the program under Wine.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::{BUNDLE, FIXTURE, PROMPT, Ran, Scene, copy, finish, piped, write};
use crate::cargo::Result;

pub(super) type Check = fn(&Scene) -> Result<()>;

/// All of them, each with its name.
pub(super) const CHECKS: [(&str, Check); 11] = [
    ("help and the doctor's report", doctor),
    ("QNN libraries that cannot be opened", libraries),
    ("what a bundle is made of", inspect),
    ("greedy answers are the reference's", answers),
    ("the text is that of this machine", text),
    ("a conversation", chat),
    ("a reader that leaves", closed_pipe),
    ("text on a console", console),
    ("Ctrl-C on a console", ctrl_c),
    ("installed plugins are locked", plugins),
    ("plugins that crash or are none", bad_plugins),
];

fn doctor(scene: &Scene) -> Result<()> {
    scene.qhx(&["--help"])?.code(0)?.says(&["Usage: qhx", "generate"])?;
    let report = scene.qhx(&["doctor"])?.code(0)?.says(&[
        "ok      platform     windows x86_64",
        "ok      cpu backend",
        "missing qnn backend",
        "llama_generate",
        r"Äpfel & Öl\Programm Ordner\qhx_ops_llama_plugin.dll",
        "ok      cache folder",
    ])?;
    // What the libraries are called elsewhere is of no use here.
    if report.stdout.contains(".so") {
        return Err(report.unexpected("Windows's names of the libraries"));
    }
    Ok(())
}

fn libraries(scene: &Scene) -> Result<()> {
    for name in ["QnnHtp.dll", "QnnSystem.dll"] {
        write(&scene.folder.join(name), "version https://git-lfs.github.com/spec/v1\n")?;
    }
    scene.qhx(&["doctor", "--htp", "QnnHtp.dll"])?.code(1)?.says(&[
        "BROKEN  qnn backend  Qnn",
        ".dll: not a shared library (no PE header)",
        "Git LFS pointer",
    ])?;
    scene
        .qhx(&["generate", BUNDLE, PROMPT, "--backend", "qnn", "--htp", r"nirgends\QnnHtp.dll"])?
        .code(5)?
        .says(&[r"error: nirgends\Qnn", "give the path of the file QnnHtp.dll"])?;
    // A library of Windows's own is one, and none of Qualcomm's.
    let other = scene.folder.join("Programm Ordner/qhx_ops_llama_plugin.dll");
    copy(&other, &scene.folder.join("QnnSystem.dll"))?;
    scene
        .qhx(&["generate", BUNDLE, PROMPT, "--backend", "qnn", "--htp", "QnnSystem.dll"])?
        .code(5)?
        .says(&["QnnSystem.dll: not a QNN library of the expected kind", "give QnnHtp.dll"])?;
    Ok(())
}

fn inspect(scene: &Scene) -> Result<()> {
    scene.qhx(&["inspect", BUNDLE])?.code(0)?.says(&["llama_generate", BUNDLE])?;
    scene.qhx(&["verify", BUNDLE])?.code(0)?;
    scene.qhx(&["inspect", r"C:\gibt es nicht"])?.code(3)?.says(&[r"error: C:\gibt es nicht: "])?;
    Ok(())
}

fn answers(scene: &Scene) -> Result<()> {
    let suite = format!("Z:{}", qhx_paths::workspace().join(FIXTURE).join("suite.json").display());
    let report = scene.qhx(&["verify", BUNDLE, &suite, "--json"])?.code(0)?;
    let json = report.json()?;
    let (passed, cases) = (&json["passed"], json["cases"].as_array().map_or(0, Vec::len));
    if cases == 0 || *passed != Value::Bool(true) || json["gate"] != "greedy_exact" {
        return Err(report.unexpected("every answer to be the reference's"));
    }
    Ok(())
}

fn text(scene: &Scene) -> Result<()> {
    let here = Command::new(&scene.host)
        .args(["generate", BUNDLE, PROMPT, "--backend", "cpu"])
        .current_dir(&scene.folder)
        .output()
        .map_err(|e| format!("qhx: {e}"))?;
    let here = String::from_utf8_lossy(&here.stdout).into_owned();
    let windows = scene.qhx(&["generate", BUNDLE, PROMPT, "--backend", "cpu"])?.code(0)?;
    if here.is_empty() || windows.stdout != here {
        return Err(windows.unexpected(&format!("{here:?}")));
    }
    // Absolute, with the slashes of the other systems, and from standard input.
    let bundle = format!("Z:{}/{BUNDLE}", scene.folder.display());
    let again =
        scene.qhx_reading(&["generate", &bundle, "-"], &format!("{PROMPT}\r\n"))?.code(0)?;
    if again.stdout != here {
        return Err(again.unexpected(&format!("{here:?}")));
    }
    Ok(())
}

fn chat(scene: &Scene) -> Result<()> {
    let ran =
        scene.qhx_reading(&["chat", BUNDLE, "--max-new", "4", "--json"], "Hallo\r\nÄpfel\r\n")?;
    let ran = ran.code(0)?;
    let answers = ran.stdout.lines().filter(|line| line.contains("\"finish_reason\"")).count();
    if answers == 2 { Ok(()) } else { Err(ran.unexpected("two answers")) }
}

fn closed_pipe(scene: &Scene) -> Result<()> {
    let arguments = ["generate", BUNDLE, PROMPT, "--max-new", "200", "--ignore-eos"];
    let mut child = piped(&mut scene.command(&arguments))?;
    let mut first = [0; 1];
    if let Some(mut stdout) = child.stdout.take()
        && let Err(error) = stdout.read_exact(&mut first)
    {
        let ran = finish(child, "qhx generate".to_owned())?;
        return Err(ran.unexpected(&format!("text on standard output: {error}")));
    }
    // Nobody reads on, and that is no failure.
    let ran = finish(child, "qhx generate".to_owned())?.code(0)?;
    if ran.stderr.contains("error") { Err(ran.unexpected("no error")) } else { Ok(()) }
}

/// A run on a console, which Wine draws on the terminal that `script` makes. What it prints comes without the
/// sequences that draw and without line ends, of which a console makes some of its own.
fn on_console(scene: &Scene, arguments: &[&str], interrupt_after: Option<&str>) -> Result<Ran> {
    let mut command = scene.environment(Path::new("script"));
    command.args(["--quiet", "--return", "--command"]);
    // Names from the environment need no quoting.
    let words: Vec<_> = (0..arguments.len()).map(|i| format!("\"$ARGUMENT_{i}\"")).collect();
    command.arg(format!("exec \"$WINE\" \"$PROGRAM\" {}", words.join(" "))).arg("/dev/null");
    command.env("WINE", &scene.wine).env("PROGRAM", &scene.program);
    for (index, argument) in arguments.iter().enumerate() {
        command.env(format!("ARGUMENT_{index}"), argument);
    }
    let mut child = piped(&mut command)?;
    let (Some(mut stdin), Some(mut stdout)) = (child.stdin.take(), child.stdout.take()) else {
        return Err("script has no pipes".to_owned());
    };
    let mut seen = Vec::new();
    if let Some(sign) = interrupt_after {
        let mut byte = [0];
        while !undrawn(&seen).contains(sign) {
            if !matches!(stdout.read(&mut byte), Ok(1)) {
                return Err(format!("{sign:?} never came: {}", undrawn(&seen)));
            }
            seen.push(byte[0]);
        }
        stdin.write_all(b"\x03").map_err(|e| format!("script: {e}"))?;
    }
    child.stdout = Some(stdout);
    let ran = finish(child, arguments.join(" "))?;
    drop(stdin);
    Ok(Ran { stdout: undrawn(&seen) + &undrawn(ran.stdout.as_bytes()), ..ran })
}

/// Text without escape sequences and line ends.
fn undrawn(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let mut plain = String::new();
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        match c {
            // `ESC [ … letter`.
            '\u{1b}' => drop(rest.find(char::is_ascii_alphabetic)),
            '\r' | '\n' => {}
            c => plain.push(c),
        }
    }
    plain
}

fn console(scene: &Scene) -> Result<()> {
    let ran = on_console(scene, &["generate", BUNDLE, PROMPT], None)?.code(0)?;
    // In a code page that is not UTF-8 this would be something else.
    ran.says(&["A small café there opens at seven"]).map(drop)
}

fn ctrl_c(scene: &Scene) -> Result<()> {
    let arguments = ["generate", BUNDLE, PROMPT, "--max-new", "200", "--ignore-eos"];
    let ran = on_console(scene, &arguments, Some("Paris"))?;
    ran.code(130)?.says(&["Paris", "finish: cancelled"]).map(drop)
}

fn plugins(scene: &Scene) -> Result<()> {
    let plugin = r"Programm Ordner\qhx_ops_llama_plugin.dll";
    scene.qhx(&["plugins", "install", plugin])?.code(0)?;
    // Once more: a file that was installed is replaced.
    scene.qhx(&["plugins", "install", plugin])?.code(0)?;
    let list = scene.qhx(&["plugins", "list", "--json"])?.code(0)?;
    let installed = find_file(&scene.prefix.join("drive_c/users"), "qhx_ops_llama_plugin.dll")
        .ok_or_else(|| list.unexpected("a plugin in the user's folder"))?;
    scene.qhx(&["plugins", "verify"])?.code(0)?.says(&["ok", "qhx_ops_llama_plugin.dll"])?;
    scene.qhx(&["generate", BUNDLE, PROMPT, "--max-new", "1"])?.code(0)?;
    let mut bytes = std::fs::read(&installed).map_err(|e| e.to_string())?;
    bytes.push(0);
    std::fs::write(&installed, bytes).map_err(|e| e.to_string())?;
    scene.qhx(&["plugins", "verify"])?.code(1)?.says(&["changed since it was installed"])?;
    scene.qhx(&["plugins", "remove", "qhx_ops_llama_plugin"])?.code(0)?;
    if installed.exists() { Err(format!("{} is still there", installed.display())) } else { Ok(()) }
}

fn bad_plugins(scene: &Scene) -> Result<()> {
    scene.qhx(&["--plugin-dir", "malformed", "doctor"])?.code(1)?.says(&[
        r"malformed\crash_on_load.dll: not loaded: loading it ended the process that tried it (exit code 0xc",
        r"malformed\text.dll: cannot be loaded as a dynamic library",
        "llama_generate",
    ])?;
    // The others work all the same.
    let with_malformed =
        ["--plugin-dir", "malformed", "generate", BUNDLE, PROMPT, "--max-new", "1"];
    scene.qhx(&with_malformed)?.code(0)?;
    scene
        .qhx(&["plugins", "install", r"malformed\crash_on_load.dll"])?
        .code(8)?
        .says(&["not installed: "])?;
    Ok(())
}

/// The first file of a name below a folder.
fn find_file(folder: &Path, name: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?;
    entries.flatten().map(|entry| entry.path()).find_map(|path| {
        let is_folder = path.symlink_metadata().is_ok_and(|data| data.is_dir());
        if is_folder { find_file(&path, name) } else { path.ends_with(name).then_some(path) }
    })
}
