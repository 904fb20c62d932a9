//! Cost of the plugin interface: a decode step of an op that does next to nothing, called as a trait object of the
//! engine, through the interface in the same program, and through the interface in a library; and the cost of finding
//! and loading many plugins.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use qhx_base::CancelToken;
use qhx_benches::null::NullModel;
use qhx_core::op::{HostOp, OpProvider};
use qhx_exec::backend::{Backend, ContextSource};
use qhx_exec::null::NullBackend;
use qhx_exec::{BufferId, GraphId, Workspace};
use qhx_plugins::{PluginOptions, Plugins, Prober, Store, survey};
use qhx_types::{DType, GraphInfo, Port, TensorInfo};
use serde_json::json;

use crate::Anything;
use crate::measure::{TURNS, best};
use crate::trivial::NAME;

/// Has this program try a plugin, in a process of its own.
pub(crate) const PROBE: &str = "--probe";

const VOCAB: usize = 16;
const STEPS: u32 = 200_000;
const PLUGINS: usize = 50;

fn contexts() -> Vec<(String, Vec<GraphInfo>)> {
    let graph = GraphInfo::new("step", [], [TensorInfo::new("logits", DType::F32, [1, VOCAB])]);
    vec![("step".to_owned(), vec![graph])]
}

/// The same step without the interface: what a host-op compiled into the engine would do.
struct Direct {
    workspace: Workspace,
    logits: BufferId,
    position: usize,
}

impl Direct {
    fn open() -> Anything<Self> {
        let backend = Arc::new(NullBackend::new(contexts()));
        let source = ContextSource { key: "step".to_owned(), ..ContextSource::default() };
        let context = backend.open_context(&source)?;
        let mut workspace = Workspace::new(backend, CancelToken::new());
        workspace.add_context("step", &context)?;
        let logits = workspace.allocate(VOCAB * 4)?;
        workspace.bind(GraphId(0), Port::Output(0), logits, 0)?;
        Ok(Self { workspace, logits, position: 0 })
    }

    #[inline(never)]
    fn decode(&mut self) -> qhx_base::Result<&[u8]> {
        self.workspace.execute(GraphId(0))?;
        self.position += 1;
        self.workspace.bytes(self.logits)
    }
}

fn direct() -> Anything<Duration> {
    let mut direct = Direct::open()?;
    let mut best = Duration::MAX;
    for _ in 0..TURNS {
        let start = Instant::now();
        for _ in 0..STEPS {
            std::hint::black_box(direct.decode()?);
        }
        best = best.min(start.elapsed());
    }
    Ok(best)
}

fn through_the_interface(folder: &Path, plugins: &Plugins) -> Anything<Duration> {
    let model = NullModel {
        op: NAME,
        params: json!({}),
        plan: json!({}),
        artifacts: json!({}),
        contexts: contexts(),
        threads: 1,
    };
    let mut op: Box<dyn HostOp> = model.open(folder, plugins)?;
    let found = best(
        &mut *op,
        TURNS,
        |op| Ok(op.reset()?),
        |op| {
            for token in 0..STEPS {
                op.decode(token & 15)?;
                std::hint::black_box(op.logits()?);
            }
            Ok(())
        },
    )?;
    Ok(found.time)
}

pub(crate) fn run(folder: &Path) -> Anything {
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
    let only = |files: Vec<PathBuf>| {
        Plugins::discover(&PluginOptions::default().files(files).only_named(true))
    };
    let base = direct()?;
    let linked = through_the_interface(folder, &only(vec![])?)?;
    let loaded = through_the_interface(folder, &only(vec![plugin.clone()])?)?;
    let nanoseconds = |total: Duration| total.as_secs_f64() * 1e9 / f64::from(STEPS);
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
    many(folder, &exe, &plugin)
}

/// Files of their own, as different plugins are.
fn many(folder: &Path, exe: &Path, plugin: &Path) -> Anything {
    let loose = folder.join("loose");
    std::fs::create_dir(&loose)?;
    let store = Store::new(folder.join("installed"));
    let prober = Prober::new(exe, [PROBE]);
    for index in 0..PLUGINS {
        let name = format!(
            "{}qhx_ops_{index:02}{}",
            std::env::consts::DLL_PREFIX,
            std::env::consts::DLL_SUFFIX
        );
        let file = loose.join(name);
        std::fs::copy(plugin, &file)?;
        store.install(&file, Some(&prober))?;
    }
    let dir = |dir: &Path| PluginOptions::default().dirs(vec![dir.to_owned()]).only_named(true);
    let bytes = std::fs::metadata(plugin)?.len();
    println!("{PLUGINS} plugins of {:.1} MB, ms", bytes as f64 / 1e6);
    let timed = |what: &str, run: &mut dyn FnMut() -> Anything| -> Anything {
        let start = Instant::now();
        run()?;
        println!("  {what:<32} {:8.2}", start.elapsed().as_secs_f64() * 1e3);
        Ok(())
    };
    let mut plugins = None;
    timed("list installed", &mut || Ok(survey(&dir(store.dir())).map(drop)?))?;
    timed("discover installed", &mut || {
        plugins = Some(Plugins::discover(&dir(store.dir()))?);
        Ok(())
    })?;
    let plugins = plugins.ok_or("no plugins")?;
    timed("hash and load one installed", &mut || Ok(plugins.find(NAME).map(drop)?))?;
    timed("verify installed", &mut || Ok(store.verify().map(drop)?))?;
    timed("load that are not installed", &mut || Ok(Plugins::discover(&dir(&loose)).map(drop)?))
}
