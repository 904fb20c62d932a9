//! `qhx serve`: bundles over HTTP.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use qhx::{Bundle, CancelToken, Runtime};
use qhx_base::{Result, error};
use qhx_server::{Server, ServerOptions};
use qhx_tools::models::Machine;

use crate::Status;
use crate::app::App;
use crate::args::{BackendArgs, DecodeArgs, IndexArgs, Switch, parse_seconds};
use crate::catalog::NamedModels;

const EXAMPLES: &str = "\
Examples:
  qhx serve                             # models are chosen on the page, http://127.0.0.1:8080
  qhx serve qwen35/v81
  qhx serve qwen35/v81 code,text-embedding-3-small=embedcode/v81 --port 9000
  qhx serve qwen35/v81 --host 0.0.0.0 --api-key-file keys.txt
  curl http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' \\
    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Name three rivers.\"}]}'

The address goes to standard output once the server listens, and a line a request to standard error.";

/// Serve bundles over HTTP
///
/// Clients of OpenAI's, Anthropic's and Ollama's interfaces are answered: chats, completions, responses, messages,
/// embeddings and transcriptions. Several requests take turns on the device; further ones wait.
///
/// The first Ctrl-C, or SIGTERM, lets what is under way finish; the second one ends the program.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ServeArgs {
    /// The bundles: folders, manifests, or manifests' names in their folders. NAME=BUNDLE serves one under another name
    /// than that of its manifest, NAME,ALIAS=BUNDLE under several. Names that were pulled are bundles, too
    #[arg(value_name = "BUNDLE")]
    pub bundles: Vec<String>,
    /// Let clients pull, add and remove models of the index, as the page at / does; off does not [default: on where
    /// only this machine can connect, or a key is asked for]
    #[arg(long, value_enum, value_name = "ON|OFF")]
    pub catalog: Option<Switch>,
    #[command(flatten)]
    pub index: IndexArgs,
    /// The address to listen on; 0.0.0.0 for all of this machine's
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// The port to listen on; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    pub port: u16,
    /// Speak the Wyoming protocol, too, of Home Assistant, on this port of --host or on this address. It knows no keys:
    /// whoever can connect is served
    #[arg(long, value_name = "[ADDRESS:]PORT", value_parser = parse_wyoming)]
    pub wyoming: Option<Wyoming>,
    /// Answer requests for models that are not served, too, by the first bundle that can: for clients that ask for one
    /// name only, such as gpt-4o
    #[arg(long)]
    pub any_model: bool,
    /// Ask for one of the keys in this file: one a line
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Answer pages of this origin, such as https://example.org; * for any. May be given several times
    #[arg(long, value_name = "ORIGIN")]
    pub allow_origin: Vec<String>,
    /// Answer requests that name the server so, such as models.example.org, where no key is asked for; * for any name.
    /// Addresses, localhost and the machine's name always are. May be given several times
    #[arg(long, value_name = "HOST")]
    pub allow_host: Vec<String>,
    /// Requests that are worked on at once, each with a state of its own
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub parallel: u16,
    /// Requests that may wait for their turn; further ones are refused
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub queue: u16,
    /// Memory for models in MiB, by the size of the files that they open, their sessions and kept states: where it does
    /// not hold all, the one that was used the longest time ago goes [default: no limit]
    #[arg(long, value_name = "MIB")]
    pub model_memory: Option<u32>,
    /// Unload a model that nobody used for this time, unless a client asks for another one with `keep_alive` [default:
    /// never]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub keep_alive: Option<Duration>,
    /// Memory for states of earlier conversations of each model in MiB: a conversation that comes back goes on from its
    /// state, and one that begins as another did from what both begin with; 0 keeps none [default: a sixteenth of this
    /// machine's memory, at most 1024, among all models]
    #[arg(long, value_name = "MIB")]
    pub state_memory: Option<u32>,
    /// Let clients of different keys go on from each other's states. They can then tell what prompts of others begin
    /// with: for the keys of one team
    #[arg(long)]
    pub share_states: bool,
    /// Greatest size of a request in MiB
    #[arg(long, value_name = "MIB", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..))]
    pub max_body: u16,
    /// Memory for all requests together in MiB, each of which counts as twice its size: a body is read once there is
    /// room for it
    #[arg(long, value_name = "MIB", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub request_memory: u32,
    /// Time that a request may take, waiting included
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = parse_seconds)]
    pub time_limit: Duration,
    /// Time that requests under way may take once the server is asked to stop
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = parse_seconds)]
    pub drain: Duration,
    /// Give the vote for the power mode back after this time without work
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = parse_seconds)]
    pub idle_release: Duration,
    /// Give each text a graph of its own: its vector has the same bits whatever comes with it, at a lower rate
    #[arg(long)]
    pub no_pack: bool,
    /// Give each request steps of its own: without it, requests that generate at the same time take theirs together,
    /// where the backend or the bundle can
    #[arg(long)]
    pub no_batching: bool,
    /// Print what requests ask, too
    #[arg(long)]
    pub log_prompts: bool,
    #[command(flatten)]
    pub decode: DecodeArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
}

/// Address of the Wyoming protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wyoming {
    /// A port of the server's address.
    Port(u16),
    Address(SocketAddr),
}

fn parse_wyoming(text: &str) -> std::result::Result<Wyoming, String> {
    let port = text.parse().map(Wyoming::Port);
    let address = text.parse().map(Wyoming::Address);
    port.or(address).map_err(|_| "expected a port, or an address such as 0.0.0.0:10300".to_owned())
}

impl ServeArgs {
    /// Address of the Wyoming protocol. One that others can reach has to be named where keys are asked for.
    fn wyoming(&self) -> Result<Option<SocketAddr>> {
        Ok(match self.wyoming {
            None => None,
            Some(Wyoming::Address(address)) => Some(address),
            Some(Wyoming::Port(port))
                if !self.host.is_loopback() && self.api_key_file.is_some() =>
            {
                let host = self.host;
                return Err(error!(
                    Usage,
                    "--wyoming {port}: the protocol knows no keys, and --api-key-file asks for them"
                )
                .hint(format!(
                    "--wyoming 127.0.0.1:{port} serves this machine alone, --wyoming {} others without a key",
                    SocketAddr::new(host, port)
                )));
            }
            Some(Wyoming::Port(port)) => Some(SocketAddr::new(self.host, port)),
        })
    }
}

/// Runs the command.
pub(crate) fn run(args: &ServeArgs, app: &mut App) -> Result<Status> {
    let backend = BackendArgs { idle_release: Some(args.idle_release), ..args.backend.clone() };
    // Ctrl-C lets models finish what they do.
    let states = args.state_memory.map_or_else(
        || default_state_memory(machine_memory(), args.bundles.len()),
        |mebibytes| u64::from(mebibytes) << 20,
    );
    let states = usize::try_from(states).unwrap_or(usize::MAX);
    let runtime = app.runtime(&backend, None).keep_states(states).cancel(CancelToken::new());
    let runtime = match args.decode.decode_on {
        Some(on) => runtime.decode_on(on).build(),
        None => runtime.build(),
    };
    let mut options = options(args, &runtime)?;
    let closed = args.host.is_loopback() || args.api_key_file.is_some();
    if args.catalog.map_or(closed, Switch::is_on) {
        options = options.catalog(NamedModels {
            models: args.index.models(&app.interrupts)?,
            machine: Machine::of(args.backend.backend, &args.backend.libraries.files())?,
            runtime: runtime.clone(),
        });
    }
    let mut options = options.runtime(runtime);
    if let Some(file) = &args.api_key_file {
        options = options.api_key_file(file)?;
    }
    if !args.host.is_loopback() && args.api_key_file.is_none() {
        say!("note: others in this network can use the models: --api-key-file asks for a key");
    }
    let server = Server::bind(options)?;
    app.output.line(&format!("http://{}", server.address()))?;
    if let Some(address) = server.wyoming_address() {
        app.output.line(&format!("tcp://{address}"))?;
    }
    let stop = CancelToken::new();
    let _working = app.interrupts.working_on(&stop);
    server.run(&stop)?;
    Ok(Status::Done)
}

fn options(args: &ServeArgs, runtime: &Runtime) -> Result<ServerOptions> {
    let mut options = ServerOptions::default()
        .listen(args.host, args.port)
        .wyoming(args.wyoming()?)
        .parallel(args.parallel.into())
        .queue(args.queue.into())
        .memory(args.model_memory.map(|mebibytes| u64::from(mebibytes) << 20))
        .keep_alive(args.keep_alive)
        .max_body(usize::from(args.max_body) << 20)
        .request_memory(usize::try_from(u64::from(args.request_memory) << 20).unwrap_or(usize::MAX))
        .time_limit(args.time_limit)
        .drain(args.drain)
        .packs(!args.no_pack)
        .batching(!args.no_batching)
        .any_model(args.any_model)
        .share_states(args.share_states)
        .log_prompts(args.log_prompts)
        .on_request(|record| say!("{record}"));
    for origin in &args.allow_origin {
        options = options.allow_origin(origin);
    }
    for host in &args.allow_host {
        options = options.allow_host(host);
    }
    for named in &args.bundles {
        options = add(options, named, runtime)?;
    }
    Ok(options)
}

/// Bytes for states of each of some models, on a machine with `memory` bytes; where that is not known, as on a phone.
fn default_state_memory(memory: Option<u64>, models: usize) -> u64 {
    let all = memory.unwrap_or(4 << 30) / 16;
    all.min(1 << 30) / models.max(1) as u64
}

/// Bytes of memory of this machine, where the system says it.
fn machine_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

/// Serves `BUNDLE`, `NAME=BUNDLE` or `NAME,ALIAS=BUNDLE`, too.
fn add(options: ServerOptions, named: &str, runtime: &Runtime) -> Result<ServerOptions> {
    let open = |path: &str| -> Result<Bundle> { runtime.bundle(Path::new(path), None) };
    match named.split_once('=') {
        Some((names, path)) if !Path::new(named).exists() && !names.is_empty() => {
            let mut names = names.split(',').map(str::trim);
            let options = options.bundle_as(names.next().unwrap_or_default(), open(path)?);
            Ok(names.fold(options, ServerOptions::alias))
        }
        _ => Ok(options.bundle(open(named)?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_without_keys_have_to_be_named() {
        #[derive(clap::Parser)]
        struct Program {
            #[command(flatten)]
            serve: ServeArgs,
        }
        let address = |args: &[&str]| {
            let args = ["qhx", "bundle"].iter().chain(args);
            <Program as clap::Parser>::parse_from(args).serve.wyoming()
        };
        let keys = ["--api-key-file", "keys", "--host", "0.0.0.0", "--wyoming"];
        let refused = address(&[&keys[..], &["10300"]].concat()).unwrap_err();
        assert!(refused.message().contains("knows no keys"), "{refused}");
        assert!(refused.hint_text().unwrap_or_default().contains("0.0.0.0:10300"), "{refused}");
        let named = address(&[&keys[..], &["0.0.0.0:10300"]].concat()).unwrap();
        assert_eq!(named, Some(([0, 0, 0, 0], 10300).into()));
        for (args, expected) in [
            (&["--wyoming", "1"][..], Some(([127, 0, 0, 1], 1).into())),
            (&["--host", "0.0.0.0", "--wyoming", "1"], Some(([0, 0, 0, 0], 1).into())),
            (&["--api-key-file", "keys", "--wyoming", "1"], Some(([127, 0, 0, 1], 1).into())),
            (&[], None),
        ] {
            assert_eq!(address(args).unwrap(), expected, "{args:?}");
        }
        assert!(parse_wyoming("host:1").unwrap_err().contains("10300"));
    }

    #[test]
    fn memory_for_states_follows_that_of_the_machine() {
        let gibibytes =
            |memory: u64, models| default_state_memory(Some(memory << 30), models) >> 20;
        assert_eq!([8, 16, 64].map(|memory| gibibytes(memory, 1)), [512, 1024, 1024]);
        assert_eq!([8, 64].map(|memory| gibibytes(memory, 2)), [256, 512]);
        assert_eq!(default_state_memory(None, 1) >> 20, 256);
    }
}
