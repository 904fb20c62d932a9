//! Cost of the plugin interface: a decode step of an op that does next to nothing, called as a trait object of the
//! engine, through the interface in the same program, and through the interface in a library; and the cost of finding
//! and loading many plugins.

#![expect(clippy::print_stdout, reason = "the report is what it prints")]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use qhx_base::CancelToken;
use qhx_core::Manifest;
use qhx_core::op::{HostOp, OpProvider, OpServices};
use qhx_exec::backend::{Backend, ContextSource};
use qhx_exec::null::NullBackend;
use qhx_exec::{GraphId, Workspace};
use qhx_plugins::{PluginOptions, Plugins, Prober, Store, survey};
use qhx_types::{DType, GraphInfo, Port, TensorInfo};
use serde_json::json;

#[path = "../trivial.rs"]
mod trivial;

type AnyError = Box<dyn std::error::Error>;

const VOCAB: usize = 16;
const STEPS: u32 = 200_000;
const PLUGINS: usize = 50;

/// The same step without the interface: what a host-op compiled into the engine would do.
struct Direct {
    workspace: Workspace,
    graph: GraphId,
    logits: qhx_exec::BufferId,
    position: usize,
}

impl Direct {
    fn open() -> Result<Self, AnyError> {
        let (mut workspace, graph) = workspace()?;
        let logits = workspace.allocate(VOCAB * 4)?;
        workspace.bind(graph, Port::Output(0), logits, 0)?;
        Ok(Self { workspace, graph, logits, position: 0 })
    }

    #[inline(never)]
    fn decode(&mut self) -> qhx_base::Result<&[u8]> {
        self.workspace.execute(self.graph)?;
        self.position += 1;
        self.workspace.bytes(self.logits)
    }
}

fn workspace() -> Result<(Workspace, GraphId), AnyError> {
    let graph = GraphInfo::new("step", [], [TensorInfo::new("logits", DType::F32, [1, VOCAB])]);
    let backend = Arc::new(NullBackend::new(vec![("step".to_owned(), vec![graph])]));
    let source = ContextSource { key: "step".to_owned(), ..ContextSource::default() };
    let context = backend.open_context(&source)?;
    let mut workspace = Workspace::new(backend, CancelToken::new());
    workspace.add_context("step", &context)?;
    Ok((workspace, GraphId(0)))
}

fn open(folder: &Path, plugins: &Plugins) -> Result<Box<dyn HostOp>, AnyError> {
    let manifest = json!({
        "schema_version": 1,
        "artifacts": {"contexts": {"step": {"bin": "step.bin"}}},
        "plan": {"steps": [{"host": "bench_trivial"}]}
    });
    std::fs::write(folder.join("step.bin"), b"")?;
    let manifest = Manifest::from_value(&folder.join("null.json"), manifest, Some(folder))?;
    let artifacts = manifest.open_artifacts();
    let services = OpServices {
        manifest: Arc::new(manifest),
        artifacts,
        workspace: workspace()?.0,
        threads: Arc::new(rayon::ThreadPoolBuilder::new().num_threads(1).build()?),
        progress: None,
        dump: None,
    };
    Ok(plugins.open("bench_trivial", services)?)
}

/// Best of several: what the machine can do, not what else it was doing.
fn best(mut run: impl FnMut() -> Result<Duration, AnyError>) -> Result<Duration, AnyError> {
    let mut best = run()?;
    for _ in 0..8 {
        best = best.min(run()?);
    }
    Ok(best)
}

fn nanoseconds(total: Duration) -> f64 {
    total.as_secs_f64() * 1e9 / f64::from(STEPS)
}

fn time_op(op: &mut dyn HostOp) -> Result<Duration, AnyError> {
    best(|| {
        op.reset()?;
        let start = Instant::now();
        for token in 0..STEPS {
            op.decode(token & 15)?;
            std::hint::black_box(op.logits()?);
        }
        Ok(start.elapsed())
    })
}

fn main() -> Result<ExitCode, AnyError> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    if let [flag, task @ ..] = &arguments[..]
        && flag == "--probe"
    {
        return Ok(qhx_base::child::serve(task, &[qhx_plugins::probe::TASK]));
    }
    let folder = tempfile::tempdir()?;
    let exe = std::env::current_exe()?;
    let library =
        format!("{}trivial_plugin{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let plugin = exe.with_file_name("examples").join(library);
    if !plugin.is_file() {
        return Err(format!(
            "{} is missing: build it with cargo build --release -p qhx-benches --examples",
            plugin.display()
        )
        .into());
    }

    let mut direct = Direct::open()?;
    let base = best(|| {
        let start = Instant::now();
        for _ in 0..STEPS {
            std::hint::black_box(direct.decode()?);
        }
        Ok(start.elapsed())
    })?;
    let only = |files: Vec<PathBuf>| PluginOptions::default().files(files).only_named(true);
    let linked = time_op(&mut *open(folder.path(), &Plugins::discover(&only(vec![]))?)?)?;
    let loaded =
        time_op(&mut *open(folder.path(), &Plugins::discover(&only(vec![plugin.clone()]))?)?)?;
    println!("decode step of one empty graph, ns: call, execute, logits");
    println!("  without the interface      {:8.1}", nanoseconds(base));
    for (name, time) in [("interface, linked in", linked), ("interface, library", loaded)] {
        println!(
            "  {name:<26} {:8.1}   + {:.1} ns, ratio {:.2}",
            nanoseconds(time),
            nanoseconds(time) - nanoseconds(base),
            time.as_secs_f64() / base.as_secs_f64()
        );
    }
    println!("  library / linked in: {:.3}", loaded.as_secs_f64() / linked.as_secs_f64());

    // Files of their own, as different plugins are.
    let loose = folder.path().join("loose");
    std::fs::create_dir(&loose)?;
    let store = Store::new(folder.path().join("installed"));
    let prober = Prober::new(&exe, ["--probe"]);
    for index in 0..PLUGINS {
        let name = format!(
            "{}qhx_ops_{index:02}{}",
            std::env::consts::DLL_PREFIX,
            std::env::consts::DLL_SUFFIX
        );
        let file = loose.join(name);
        std::fs::copy(&plugin, &file)?;
        store.install(&file, Some(&prober))?;
    }
    let dir = |dir: &Path| PluginOptions::default().dirs(vec![dir.to_owned()]).only_named(true);
    let milliseconds = |start: Instant| start.elapsed().as_secs_f64() * 1e3;
    let bytes = std::fs::metadata(&plugin)?.len();
    println!("{PLUGINS} plugins of {:.1} MB, ms", bytes as f64 / 1e6);
    let start = Instant::now();
    let rows = survey(&dir(store.dir()))?.len();
    println!("  list {rows} installed              {:8.2}", milliseconds(start));
    let start = Instant::now();
    let plugins = Plugins::discover(&dir(store.dir()))?;
    println!("  discover {rows} installed          {:8.2}", milliseconds(start));
    let start = Instant::now();
    plugins.find("bench_trivial")?;
    println!("  hash and load one installed      {:8.2}", milliseconds(start));
    let start = Instant::now();
    store.verify()?;
    println!("  verify {rows} installed            {:8.2}", milliseconds(start));
    let start = Instant::now();
    Plugins::discover(&dir(&loose))?;
    println!("  load {PLUGINS} that are not installed {:8.2}", milliseconds(start));
    Ok(ExitCode::SUCCESS)
}
