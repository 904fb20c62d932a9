//! Bundles of the repository's tiny models, each forged once, and servers over them.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;

use qhx::{BackendChoice, Bundle, CancelToken, PluginOptions, Runtime, RuntimeBuilder};
use qhx_core::manifest::{Rerank, Verdict};
use qhx_forge::{ForgeOptions, Silent, Task, forge};
use qhx_paths::fixture;
use qhx_server::{Server, ServerOptions};

use crate::client::Client;

/// A folder of this run.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    FOLDER.get_or_init(|| tempfile::tempdir().expect("a temporary folder")).path()
}

fn forged(name: &str, checkpoint: &Path, change: impl FnOnce(&mut ForgeOptions)) -> PathBuf {
    let mut options = ForgeOptions::new(folder().join(name));
    options.name = Some(name.to_owned());
    options.max_ctx = Some(200);
    change(&mut options);
    forge(checkpoint, &options, &mut Silent).expect("the bundle is made").manifest
}

/// Declares bundles of checkpoints, each made when it is first asked for.
macro_rules! bundles {
    ($($(#[$doc:meta])* $name:ident = $checkpoint:expr, $change:expr;)*) => {$(
        $(#[$doc])*
        pub fn $name() -> &'static Path {
            static MADE: OnceLock<PathBuf> = OnceLock::new();
            MADE.get_or_init(|| forged(stringify!($name), &$checkpoint, $change))
        }
    )*};
}

bundles! {
    /// Completes texts and chats.
    language = fixture("llama3-tiny"), |_| {};
    /// Has a recurrent state, and a template that knows thinking.
    recurrent = fixture("qwen35-tied"), |_| {};
    /// Ranks documents: asked to go on with a text.
    ranking = fixture("qwen3-tiny"), |options| {
        options.rerank = Some(Rerank {
            prompt: "{query}{document}".to_owned(),
            verdict: Verdict::Tokens { yes: " P".to_owned(), no: " The".to_owned() },
            ..Rerank::default()
        });
    };
    /// Embeds.
    encoder = fixture("embed-mistral-tiny"), |options| options.task = Some(Task::Embed);
    /// Embeds texts and images.
    towers = fixture("siglip-fixed"), |options| {
        (options.task, options.max_ctx) = (Some(Task::Embed), None);
    };
    /// Takes images.
    seeing = fixture("qwen3vl-tiny"), |options| {
        options.prefill = Some(vec![16]);
        options.recipe_options.insert("image-size".to_owned(), "48".to_owned());
    };
    /// Transcribes: a model without a chat template, whose manifest declares how.
    hearing = without_template("gemma4-tiny"), |options| {
        options.prefill = Some(vec![24]);
        let more = [("towers", "audio"), ("audio-tokens", "54")];
        let more = more.map(|(name, value)| (name.to_owned(), value.to_owned()));
        options.recipe_options.extend(more);
    };
    /// Transcribes with times.
    listening = fixture("whisper-tiny"), |options| options.max_ctx = None;
    /// Transcribes audio piece by piece.
    following = fixture("nemotron-tiny"), |options| options.max_ctx = None;
    /// Transcribes by CTC, in windows of one and two seconds.
    recognising = fixture("parakeet-ctc-tiny"), |options| {
        options.max_ctx = None;
        options.recipe_options.insert("windows".to_owned(), "1,2".to_owned());
    };
    /// Speaks, with sounds that are no words.
    speaking = fixture("kokoro-tiny"), |_| {};
}

/// A copy of a checkpoint without its chat template.
fn without_template(name: &str) -> PathBuf {
    let checkpoint = folder().join("without-template");
    copy(&fixture(name), &checkpoint);
    edit_json(&checkpoint.join("tokenizer_config.json"), |config| {
        config.as_object_mut().expect("an object").remove("chat_template");
    });
    checkpoint
}

/// A copy of a bundle under another name, with this change of its manifest. Returns its manifest.
pub fn changed(bundle: &Path, name: &str, edit: impl FnOnce(&mut serde_json::Value)) -> PathBuf {
    let to = folder().join(name);
    copy(bundle.parent().expect("a folder"), &to);
    let manifest = to.join(bundle.file_name().expect("a manifest"));
    edit_json(&manifest, edit);
    manifest
}

/// A copy of the language model with another chat template.
pub fn with_template(name: &str, template: &str) -> PathBuf {
    let manifest = changed(language(), name, |_| {});
    let file = manifest.with_file_name("chat_template.jinja");
    std::fs::write(file, template).expect("the template is written");
    manifest
}

/// A copy of the language model with sampling of its own.
pub fn with_sampling(name: &str, sampling: serde_json::Value) -> PathBuf {
    changed(language(), name, |manifest| manifest["params"]["sampling"] = sampling)
}

/// A copy of the reranker whose prompt begins with an instruction.
pub fn with_instruction() -> PathBuf {
    changed(ranking(), "instructed", |manifest| {
        let rerank = &mut manifest["params"]["rerank"];
        rerank["prompt"] = "{instruction}{query}{document}".into();
        rerank["instruction"] = "The ".into();
    })
}

/// A copy of the model that takes images with tools in its chat template.
pub fn seeing_with_tools() -> PathBuf {
    let manifest = changed(seeing(), "seeing-with-tools", |_| {});
    edit_json(&manifest.with_file_name("tokenizer_config.json"), |config| {
        let template = config["chat_template"].as_str().expect("a template");
        let tools =
            "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{# <tool_call> #}";
        config["chat_template"] = format!("{tools}{template}").into();
    });
    manifest
}

/// Changes a file of JSON.
fn edit_json(file: &Path, edit: impl FnOnce(&mut serde_json::Value)) {
    let text = std::fs::read_to_string(file).expect("the file is read");
    let mut json = serde_json::from_str(&text).expect("the file is JSON");
    edit(&mut json);
    std::fs::write(file, json.to_string()).expect("the file is written");
}

/// Copies a folder.
pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a folder");
    for entry in std::fs::read_dir(from).expect("the folder is read") {
        let entry = entry.expect("the folder is read");
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).expect("the file is copied");
        }
    }
}

pub fn builder() -> RuntimeBuilder {
    Runtime::builder()
        .backend(BackendChoice::Cpu)
        .threads(2)
        .plugins(PluginOptions::default().only_named(true))
}

pub fn runtime() -> Runtime {
    builder().build()
}

/// One that keeps states of conversations.
pub fn keeping() -> Runtime {
    builder().keep_states(64 << 20).build()
}

/// Options of a server over bundles, on a free port.
pub fn options<'a>(bundles: impl IntoIterator<Item = (&'a str, &'a Path)>) -> ServerOptions {
    let options = ServerOptions::default().runtime(runtime()).listen([127, 0, 0, 1].into(), 0);
    bundles.into_iter().fold(options, |options, (name, path)| {
        options.bundle_as(name, Bundle::open(path).expect("the bundle is there"))
    })
}

/// A server that runs until it is dropped.
pub struct Running {
    pub client: Client,
    /// Address of the Wyoming protocol.
    pub wyoming: Option<std::net::SocketAddr>,
    pub stop: CancelToken,
    /// A line for each request that is over.
    pub lines: Arc<Mutex<Vec<String>>>,
    thread: Option<JoinHandle<qhx::Result<()>>>,
}

impl Running {
    pub fn start(options: ServerOptions) -> Self {
        let lines: Arc<Mutex<Vec<String>>> = Arc::default();
        let log = Arc::clone(&lines);
        let options =
            options.on_request(move |record| log.lock().expect("the log").push(record.to_string()));
        let server = Server::bind(options).expect("the server listens");
        let client = Client::new(server.address());
        let wyoming = server.wyoming_address();
        let stop = CancelToken::new();
        let until = stop.clone();
        let thread = std::thread::spawn(move || server.run(&until));
        Self { client, wyoming, stop, lines, thread: Some(thread) }
    }

    /// Asks it to stop, and waits until it has.
    pub fn end(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the server does not panic").expect("the server ends well");
        }
    }

    /// The lines of its log, once one has `text`.
    pub fn line_with(&self, text: &str) -> String {
        for _ in 0..2000 {
            let lines = self.lines.lock().expect("the log");
            if let Some(line) = lines.iter().find(|line| line.contains(text)) {
                return line.clone();
            }
            drop(lines);
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        panic!("no line has {text:?}: {:?}", self.lines);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A server that tests share: a language model, an encoder and a recurrent model.
pub fn shared() -> &'static Running {
    static SHARED: OnceLock<Running> = OnceLock::new();
    SHARED.get_or_init(|| {
        let bundles =
            [("language", language()), ("encoder", encoder()), ("recurrent", recurrent())];
        Running::start(options(bundles))
    })
}

/// The answer of a golden conversation's first turn: its question and its answer.
pub fn golden(name: &str, chat: &str) -> (Option<String>, String, String) {
    let text = std::fs::read_to_string(fixture(name).join("goldens.json")).expect("goldens");
    let goldens: serde_json::Value = serde_json::from_str(&text).expect("goldens are JSON");
    let chats = goldens["chat"].as_array().expect("chats");
    let chat = chats.iter().find(|one| one["id"] == chat).expect("the chat");
    let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
    let turn = &chat["turns"][0];
    let (user, answer) = (text(&turn["user"]), text(&turn["text"]));
    (text(&chat["system"]), user.expect("a question"), answer.expect("an answer"))
}
