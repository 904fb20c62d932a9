//! Every environment variable that the library and the programs read, declared once.
//!
//! The table of `docs/cli.md` and the one under `qhx --help` are made of [`ALL`], and `qhx doctor` shows those that are
//! set. `INSTA_UPDATE=always cargo test -p qhx vars` writes the page's table again.

use std::env;
use std::ffi::OsString;

/// An environment variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// Description for `--help`.
    pub what: &'static str,
    /// Further remarks for the page.
    pub more: &'static str,
    /// Default if the variable is not set; empty for none.
    pub default: &'static str,
    /// Programs and functions that read it.
    pub reader: &'static str,
}

impl Variable {
    const fn new(name: &'static str, what: &'static str, reader: &'static str) -> Self {
        Self { name, what, more: "", default: "", reader }
    }

    const fn more(self, more: &'static str) -> Self {
        Self { more, ..self }
    }

    const fn default(self, default: &'static str) -> Self {
        Self { default, ..self }
    }
}

/// libQnnHtp, where `--htp` is not given.
pub const HTP: &str = "QHX_QNN_HTP";
/// libQnnSystem, where `--qnn-system` is not given.
pub const SYSTEM: &str = "QHX_QNN_SYSTEM";
/// libcdsprpc, where `--cdsprpc` is not given.
pub const CDSPRPC: &str = "QHX_CDSPRPC";
/// Kind of memory for the graphs' inputs and outputs, if `--memory` is not given.
pub const MEMORY: &str = "QHX_MEMORY";
/// Backend that executes graphs, for programs that call the C ABI or the Python package.
pub const BACKEND: &str = "QHX_BACKEND";
/// The device's architecture, for programs that call the C ABI or the Python package.
pub const DEVICE_ARCH: &str = "QHX_DEVICE_ARCH";
/// Folder for what qhx downloads and makes.
pub const CACHE_DIR: &str = "QHX_CACHE_DIR";
/// Index of models, instead of the program's own.
pub const INDEX: &str = "QHX_INDEX";
/// Public key of minisign that signs the index.
pub const INDEX_KEY: &str = "QHX_INDEX_KEY";
/// Folders that are searched for plugins.
pub const PLUGIN_PATH: &str = "QHX_PLUGIN_PATH";
/// The program that makes phonemes of texts for voices that take those of espeak-ng.
pub const ESPEAK: &str = "QHX_ESPEAK";
/// Log filter, if `--log` is not given.
pub const LOG: &str = "QHX_LOG";
/// Put before queries by `qhx_embed`, instead of the bundle's prefix.
pub const QUERY_PREFIX: &str = "QHX_EMB_QUERY_PREFIX";
/// Put before documents by `qhx_embed`, instead of the bundle's prefix.
pub const DOC_PREFIX: &str = "QHX_EMB_DOC_PREFIX";
/// The hub that bundles and checkpoints are fetched from.
pub const HF_ENDPOINT: &str = "HF_ENDPOINT";
/// Access token of the user for the hub.
pub const HF_TOKEN: &str = "HF_TOKEN";
/// Folder of what the hub's tools and `qhx pull` fetch.
pub const HF_HOME: &str = "HF_HOME";
/// Folder of the hub's cache alone.
pub const HF_HUB_CACHE: &str = "HF_HUB_CACHE";
/// The hub is not asked.
pub const HF_HUB_OFFLINE: &str = "HF_HUB_OFFLINE";
/// Folder of the QAIRT SDK, by the name that its own scripts set.
pub const QAIRT_SDK_ROOT: &str = "QAIRT_SDK_ROOT";
/// The same by its older name.
pub const QNN_SDK_ROOT: &str = "QNN_SDK_ROOT";
/// Folder of Android's SDK.
pub const ANDROID_HOME: &str = "ANDROID_HOME";
/// The same by its older name.
pub const ANDROID_SDK_ROOT: &str = "ANDROID_SDK_ROOT";
/// No colours are wanted, see <https://no-color.org>.
pub const NO_COLOR: &str = "NO_COLOR";
/// Settings of glibc's allocator; `qhx forge` adds some for the processes that compile.
pub const GLIBC_TUNABLES: &str = "GLIBC_TUNABLES";

/// All of them, in the order of the page.
pub const ALL: [Variable; 30] = [
    Variable::new(HTP, "path of libQnnHtp", "what opens QNN libraries")
        .more(
            "as `--htp`; `export QHX_QNN_HTP=\"$(qhx libraries path --htp)\"` for the installed \
             one",
        )
        .default("the installed libraries"),
    Variable::new(SYSTEM, "path of libQnnSystem", "what opens QNN libraries")
        .more("as `--qnn-system`")
        .default("beside libQnnHtp"),
    Variable::new(
        CDSPRPC,
        "path of libcdsprpc, which shares memory with the NPU",
        "what runs on the NPU",
    )
    .more("as `--cdsprpc`")
    .default("the device's"),
    Variable::new(MEMORY, "where inputs and outputs of graphs lie", "what runs on the NPU")
        .more("as `--memory`: `auto`, `registered` or `raw`")
        .default("`auto`"),
    Variable::new(BACKEND, "what executes graphs", "the C ABI, the Python package")
        .more("`auto`, `cpu` or `qnn`")
        .default("`auto`"),
    Variable::new(
        DEVICE_ARCH,
        "architecture of the device, such as `v81`",
        "the C ABI, the Python package",
    )
    .more("instead of what the libraries say, and where there is no device")
    .default("the device's"),
    Variable::new(
        CACHE_DIR,
        "folder of the QNN libraries, of models by name, and of prepared bundles",
        "`qhx libraries`, `qhx run`, `qhx prepare`",
    )
    .default("`qhx` in the user's cache folder"),
    Variable::new(INDEX, "index of models", "`qhx run`, `qhx pull`, `qhx models`")
        .more("a file, or a URL with `#sha256=…` or a signature, as `--index`")
        .default("the program's own"),
    Variable::new(INDEX_KEY, "public key that signs the index", "the same")
        .more("of minisign, in Base64 or its file, as `--index-key`"),
    Variable::new(PLUGIN_PATH, "folders that are searched for plugins", "what runs host-ops")
        .more("separated like `PATH`; absolute ones only"),
    Variable::new(
        ESPEAK,
        "the program espeak-ng, for voices that take its phonemes",
        "`qhx speak`, `qhx serve`",
    )
    .default("`espeak-ng` or `espeak` where programs are looked for"),
    Variable::new(LOG, "what is logged", "all")
        .more("as `--log`: levels by target, such as `warn,qnn=debug`")
        .default("`warn,qnn=error`"),
    Variable::new(QUERY_PREFIX, "put before the query", "`qhx_embed`")
        .more("set and empty means none")
        .default("the bundle's prefix"),
    Variable::new(DOC_PREFIX, "put before documents", "`qhx_embed`")
        .more("set and empty means none")
        .default("the bundle's prefix"),
    Variable::new(
        HF_ENDPOINT,
        "the hub that bundles and checkpoints are fetched from",
        "`qhx pull`, `qhx forge`",
    )
    .more("scheme and host")
    .default("`https://huggingface.co`"),
    Variable::new(HF_TOKEN, "what the hub knows you by", "`qhx pull`, `qhx forge`")
        .more("sent to that host only; or the file `HF_TOKEN_PATH`")
        .default("`token` in `HF_HOME`"),
    Variable::new(HF_HOME, "folder of what is fetched from a hub", "what takes a bundle")
        .more("in `hub` in it")
        .default("`huggingface` in the user's cache folder"),
    Variable::new(HF_HUB_CACHE, "the same folder, without `hub` in it", "what takes a bundle")
        .default("`hub` in `HF_HOME`"),
    Variable::new(HF_HUB_OFFLINE, "1 asks no hub", "`qhx pull`, `qhx forge`"),
    Variable::new(
        QAIRT_SDK_ROOT,
        "folder of the QAIRT SDK, with the libraries for phones",
        "`qhx push`",
    )
    .more("or `QNN_SDK_ROOT`")
    .default("the libraries that are on the phone"),
    Variable::new(ANDROID_HOME, "folder of Android's SDK, with adb", "`qhx push`")
        .more("or `ANDROID_SDK_ROOT`; where adb is not on the path"),
    Variable::new(
        "SSL_CERT_FILE",
        "a file of certificates (PEM) of the authorities that are trusted instead of those \
         built in",
        "`qhx pull`, `qhx forge`",
    )
    .more("or `REQUESTS_CA_BUNDLE`"),
    Variable::new("HTTPS_PROXY", "URL of a proxy to the hub", "`qhx pull`, `qhx forge`")
        .more("or `ALL_PROXY`; `NO_PROXY` has hosts that are reached without"),
    Variable::new("XDG_CACHE_HOME", "the user's cache folder", "all, but on Windows")
        .more(
            "remembers in `qhx` what came of trying plugins and context binaries; absolute, or \
             passed over",
        )
        .default("`.cache` in `HOME`"),
    Variable::new("XDG_DATA_HOME", "the user's data folder", "what runs host-ops, but on Windows")
        .more("installed plugins are in `qhx/plugins` in it; absolute, or passed over")
        .default("`.local/share` in `HOME`"),
    Variable::new("HOME", "the user's folder", "all, but on Windows")
        .more("absolute, or passed over")
        .default("that of the system's user database"),
    Variable::new(NO_COLOR, "no colours on the terminal", "all").default("colours on a terminal"),
    Variable::new(GLIBC_TUNABLES, "settings of glibc's allocator", "`qhx forge`, `qhx prepare`")
        .more(
            "those that make binaries come out the same are added for the processes that \
             compile",
        ),
    Variable::new("LD_LIBRARY_PATH", "folders of libraries", "the dynamic loader"),
    Variable::new(
        "ADSP_LIBRARY_PATH",
        "folders of the DSP's libraries",
        "the DSP's loader, on devices",
    )
    .more("parted by semicolons")
    .default("the folder of the skels that belong to libQnnHtp"),
];

/// The value of a variable that is set and not empty.
pub fn get(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// The table of the page.
    fn table() -> String {
        let mut text = "| variable | meaning | default | read by |\n|---|---|---|---|\n".to_owned();
        for Variable { name, what, more, default, reader } in ALL {
            let more = if more.is_empty() { String::new() } else { format!("; {more}") };
            let default = if default.is_empty() { "none" } else { default };
            text.push_str(&format!("| `{name}` | {what}{more} | {default} | {reader} |\n"));
        }
        text
    }

    #[test]
    fn the_page_lists_what_the_programs_read() {
        const HEADING: &str = "## Environment variables\n\n";
        let path = qhx_paths::workspace().join("docs/cli.md");
        let page = std::fs::read_to_string(&path).expect("the page");
        let (before, rest) = page.split_once(HEADING).expect("the heading");
        let end = rest.find("\n\n").expect("what follows the table") + 1;
        let table = table();
        if get("INSTA_UPDATE").is_some_and(|value| value == "always") {
            let page = format!("{before}{HEADING}{table}{}", &rest[end..]);
            std::fs::write(&path, page).expect("written");
        } else {
            assert_eq!(rest[..end], table, "run: INSTA_UPDATE=always cargo test -p qhx vars");
        }
    }

    /// Names of variables of ours in the source files of a folder.
    fn named(folder: &Path, names: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).expect("a folder").map(|e| e.expect("an entry")) {
            let path = entry.path();
            if path.is_dir() {
                named(&path, names);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = std::fs::read_to_string(&path).expect("a source file");
                let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                names.extend(words.filter(|w| w.starts_with("QHX_")).map(str::to_owned));
            }
        }
    }

    #[test]
    fn every_variable_of_ours_is_declared() {
        // The symbol of a plugin's root module, and what tests set for themselves.
        let other = |name: &str| name == "QHX_PLUGIN_ROOT" || name.starts_with("QHX_TEST_");
        let mut names = Vec::new();
        for folder in [
            "bindings/c/src",
            "cli/src",
            "runtime/src",
            "core/base/src",
            "core/engine/src",
            "core/exec/src",
            "core/grammar/src",
            "core/qnn/src",
            "core/text/src",
            "cpu/src",
            "forge/src",
            "hub/src",
            "plugins/host/src",
            "plugins/kit/src",
            "plugins/op/src",
        ] {
            named(&qhx_paths::workspace().join(folder), &mut names);
        }
        names.retain(|name| !other(name) && name != "QHX_");
        assert!(names.iter().any(|name| name == CACHE_DIR), "the files are read");
        for name in names {
            assert!(ALL.iter().any(|v| v.name == name), "{name} is not in vars::ALL");
        }
    }
}
