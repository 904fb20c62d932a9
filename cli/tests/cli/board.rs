//! `qhx` for boards under qemu, with Qualcomm's libraries for boards. `cargo xtask test` builds the program, and says
//! where both are: `QHX_TEST_BOARD` and `QHX_TEST_BOARD_LIBRARIES`.
//!
//! Behind the DSP's door nothing is imitated: what executes on an NPU is not tested here.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use qhx_paths::{fixture, workspace};
use qhx_tiers::tier;

use crate::run::{Program, Run, folder};

/// Folder of the libraries for AArch64 in Debian's and Ubuntu's packages.
const ROOT: &str = "/usr/aarch64-linux-gnu";

/// A chip: what the kernel calls it, what the library calls it, its architecture.
type Chip = (&'static str, &'static str, u32);

const SM8850: Chip = ("660", "SM8850", 81);
const SM8750: Chip = ("618", "SM8750", 79);
const SM8650: Chip = ("557", "SM8650", 75);

/// A board that is healthy up to the DSP's door, as long as the test changes nothing.
struct Board {
    folder: tempfile::TempDir,
    qhx: PathBuf,
    /// Folders that the loader searches.
    search: Vec<PathBuf>,
    /// Variables of the program.
    variables: Vec<(&'static str, String)>,
}

impl Board {
    /// For a test with `#[tier(board)]`.
    fn new(chip: Option<Chip>) -> Self {
        let set = |name: &str| PathBuf::from(std::env::var_os(name).expect(name));
        let (qhx, wheel) = (set("QHX_TEST_BOARD"), set("QHX_TEST_BOARD_LIBRARIES"));
        let folder = folder();
        let root = folder.path().join("root");
        fs::create_dir_all(root.join("sys/devices/system/soc/soc0")).expect("a folder");
        symlink(Path::new(ROOT).join("lib"), root.join("lib")).expect("a link");
        if let Some((id, ..)) = chip {
            fs::write(root.join("sys/devices/system/soc/soc0/id"), id).expect("a file");
        }
        let libraries = folder.path().join("qnn");
        fs::create_dir(&libraries).expect("a folder");
        for entry in fs::read_dir(wheel).expect("the libraries") {
            let path = entry.expect("the libraries").path();
            symlink(&path, libraries.join(path.file_name().expect("a name"))).expect("a link");
        }
        let search = vec![qhx.with_file_name("examples")];
        Self { folder, qhx, search, variables: Vec::new() }
    }

    fn library(&self, name: &str) -> PathBuf {
        self.folder.path().join("qnn").join(name)
    }

    /// Puts other bytes in the place of a library.
    fn replace(&self, name: &str, with: impl FnOnce(Vec<u8>) -> Vec<u8>) {
        let path = self.library(name);
        let bytes = with(fs::read(&path).expect("the library"));
        fs::remove_file(&path).expect("it was a link");
        fs::write(path, bytes).expect("written");
    }

    /// Runs `qhx` with these arguments and the board's libraries.
    fn run(&self, arguments: &[&str]) -> Run {
        let emulator = "qemu-aarch64";
        let mut command = Command::new(emulator);
        command.arg(&self.qhx).args(arguments);
        let search = std::env::join_paths(&self.search).expect("folders");
        let starter = self.qhx.with_file_name("examples").join("libexec.so");
        let loader =
            format!("LD_PRELOAD={},LD_LIBRARY_PATH={}", starter.display(), search.display());
        let mut program = Program::through(command, self.folder.path())
            .env("QEMU_LD_PREFIX", self.folder.path().join("root"))
            .env("QEMU_SET_ENV", loader)
            .env("QHX_TEST_EMULATOR", emulator)
            .env("QHX_QNN_HTP", self.library("libQnnHtp.so"));
        for (name, value) in &self.variables {
            program = program.env(name, value);
        }
        program.run()
    }

    /// Report of doctor about the NPU: the line, its hint, and the chip's name.
    fn doctor(&self) -> [String; 3] {
        let run = self.run(&["doctor", "--json", "--no-plugins"]);
        assert_eq!(run.code, 1, "{run:?}");
        let report = run.json();
        let checks = report["checks"].as_array().expect("checks");
        let broken: Vec<_> = checks.iter().filter(|c| c["health"] == "broken").collect();
        assert_eq!(broken.len(), 1, "{report}");
        let check = broken[0];
        assert_eq!(check["name"], "qnn backend", "{check}");
        let text = |value: &serde_json::Value| {
            let folder = self.library("").display().to_string();
            value.as_str().unwrap_or_default().replace(folder.trim_end_matches('/'), "FOLDER")
        };
        [text(&check["found"]), text(&check["hint"]), text(&check["details"]["chip"])]
    }
}

/// Fault of a board: its name in the page and in the message, and how it is made so.
type Situation = (&'static str, fn(&mut Board, u32));

const SITUATIONS: [Situation; 6] = [
    ("no libcdsprpc", |board, _| board.search.clear()),
    ("no stub", |board, arch| {
        fs::remove_file(board.library(&format!("libQnnHtpV{arch}Stub.so"))).expect("a link");
    }),
    ("stub of another version", |board, arch| {
        board.replace(&format!("libQnnHtpV{arch}Stub.so"), |mut bytes| {
            let version = b"v2.51.0.";
            let at = bytes.windows(version.len()).position(|part| part == version);
            bytes[at.expect("its version") + 3] = b'4';
            bytes
        });
    }),
    ("skel not found", |board, arch| {
        fs::remove_file(board.library(&format!("libQnnHtpV{arch}Skel.so"))).expect("a link");
    }),
    ("no unsigned process domain", |board, _| {
        board.variables.push(("QHX_TEST_DSP", "signed-only".to_owned()));
    }),
    ("transport down", |_, _| {}),
];

/// The row of the table in docs/devices.md.
fn row(name: &str, [found, hint, _]: &[String; 3]) -> String {
    format!("| {name} | `{found}` | {hint} |\n")
}

fn page() -> String {
    fs::read_to_string(workspace().join("docs/devices.md")).expect("the page")
}

fn doctor_names_what_is_wrong_with(chip: Chip) {
    let (_, name, arch) = chip;
    let (page, mut missing) = (page(), String::new());
    for (situation, make) in SITUATIONS {
        let mut board = Board::new(Some(chip));
        make(&mut board, arch);
        let said = board.doctor();
        assert!(said[0].starts_with(&format!("opening the device: {situation}: ")), "{said:?}");
        assert!(!said[1].is_empty(), "{said:?}");
        assert_eq!(said[2], name, "{situation}");
        let row = row(situation, &said);
        if chip == SM8850 && !page.contains(&row) {
            missing.push_str(&row);
        }
    }
    assert!(missing.is_empty(), "docs/devices.md lacks\n{missing}");
}

#[tier(board)]
fn doctor_names_what_is_wrong_with_an_sm8850() {
    doctor_names_what_is_wrong_with(SM8850);
}

#[tier(board)]
fn doctor_names_what_is_wrong_with_an_sm8750() {
    doctor_names_what_is_wrong_with(SM8750);
}

#[tier(board)]
fn doctor_names_what_is_wrong_with_an_sm8650() {
    doctor_names_what_is_wrong_with(SM8650);
}

#[tier(board)]
fn no_chip_and_an_unknown_chip_are_told_apart() {
    let board = Board::new(None);
    let said = board.doctor();
    assert!(said[0].starts_with("opening the QNN log: no SoC: "), "{said:?}");
    let row = row("no SoC", &said);
    assert!(page().contains(&row), "docs/devices.md lacks this row:\n{row}");

    let board = Board::new(Some(("9999", "", 0)));
    let said = board.doctor();
    let expected = "opening the QNN log: unknown SoC: this chip has the id 9999";
    assert!(said[0].starts_with(expected), "{said:?}");
}

#[tier(board)]
fn a_skel_that_is_a_text_file_is_told_as_such() {
    let mut board = Board::new(Some(SM8850));
    board
        .replace("libQnnHtpV81Skel.so", |_| b"version https://git-lfs.github.com/spec/v1\n".into());
    let [found, ..] = board.doctor();
    let expected = "skel not found: FOLDER/libQnnHtpV81Skel.so is no library for the DSP";
    assert!(found.contains(expected), "{found}");
    // Where the user says where skels are, that is where they are looked for.
    board.variables.push(("ADSP_LIBRARY_PATH", "/elsewhere".to_owned()));
    let [found, ..] = board.doctor();
    let expected = "finds no libQnnHtpV81Skel.so in ADSP_LIBRARY_PATH=/elsewhere ";
    assert!(found.contains(expected), "{found}");
}

#[tier(board)]
fn a_board_gives_the_tokens_of_this_machine() {
    let mut board = Board::new(Some(SM8850));
    board
        .variables
        .push(("QHX_CACHE_DIR", board.folder.path().join("cache").display().to_string()));
    let tiny = fixture("llama3-tiny");
    let forge = qhx!(board.folder, "forge", tiny);
    forge.args(["--out", "tiny", "--name", "tiny", "--max-ctx", "32", "--cpu-only"]).run().ok();
    let ask = ["generate", "tiny", "The capital of France is", "--max-new", "6", "--json"];
    let ask = [&ask[..], &["--backend", "cpu"]].concat();
    let here = Program::qhx(board.folder.path()).args(&ask).run().ok().json();
    assert!(here["text"].as_str().is_some_and(|text| text.starts_with(" Paris")), "{here}");
    let plugin = board.qhx.with_file_name("libqhx_ops_llama_plugin.so").display().to_string();
    for op in [&["--no-plugins"][..], &["--plugin", &plugin]] {
        let there = board.run(&[&ask, op].concat()).ok().json();
        assert_eq!(there["tokens"], here["tokens"], "{op:?}");
        assert_eq!(there["text"], here["text"], "{op:?}");
    }
    let list = board.run(&["plugins", "list", "--json", "--plugin", &plugin]).ok();
    list.prints(&["libqhx_ops_llama_plugin.so"]);
}

#[tier(qnn, board)]
fn board_libraries_read_binaries_without_a_dsp() {
    let board = Board::new(Some(SM8850));
    let here = || Program::npu(board.folder.path());
    let forge = here().args([Path::new("forge"), &fixture("llama3-tiny")]);
    forge
        .args(["--out", "tiny", "--name", "tiny", "--target", "v81", "--max-ctx", "32"])
        .run()
        .ok();
    let inspect = ["inspect", "tiny", "--json"];
    let (expected, found) =
        (here().args(inspect).run().ok().json(), board.run(&inspect).ok().json());
    assert!(expected["contexts"][0]["binary"]["graphs"][0]["inputs"].is_array(), "{expected}");
    assert_eq!(found, expected);

    board
        .run(&["generate", "tiny", "The capital of France is", "--backend", "qnn"])
        .fails(5, &["opening the device: transport down: "]);
}

/// The library opens the DSP before it composes anything, also for a named target.
#[tier(board)]
fn prepare_on_a_board_without_a_dsp_says_so() {
    let board = Board::new(Some(SM8850));
    let forge = qhx!(board.folder, "forge", fixture("llama3-tiny"));
    forge.args(["--out", "tiny", "--max-ctx", "32", "--portable"]).run().ok();
    for (target, opens) in [("this", "the device"), ("v81", "a device for v81")] {
        let run = board.run(&["prepare", "tiny", "--target", target]);
        assert_eq!(run.code, 5, "{run:?}");
        let expected = format!("opening {opens}: transport down: ");
        run.says(&[&expected, "14001"]);
    }
}
