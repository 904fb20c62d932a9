//! The backend that executes context binaries through libQnnHtp.
//!
//! A graph keeps its context alive, the context its device, backend and log. What its inputs and
//! outputs lie in is the matter of `registered`.

use std::collections::HashSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use qhx_base::artifacts::Mapped;
use qhx_base::trace::Trace;
use qhx_base::{Error, ErrorKind, Result};
use qhx_exec::Buffer;
use qhx_exec::backend::{Backend, BackendInfo, Batch, Context, ContextSource, Graph, Opened};
use qhx_types::GraphInfo;

use super::batch::{Places, QnnBatch, batched};
use super::codes;
use super::context::{ContextConfig, ContextHandle, Priority, SpillFill};
use super::device::Platform;
use super::graph::{GraphTensors, QnnGraph, Recorder, Services};
use super::info::BinaryInfo;
use super::library::Library;
use super::log::LogLevel;
use super::opening::{self, side_by_side};
use super::power::{PerfMode, Power};
use super::preflight::{Destination, Verdict, preflight};
use super::profile::{Profile, ProfileLevel, ProfileRecord, Records};
use super::registered::{DeviceMemory, MemoryMode};
use super::session::{Session, SessionOptions, Sessions};
use super::thermal;

/// Options for opening the backend.
#[derive(Debug, Clone, Default)]
pub struct QnnOptions {
    /// libQnnHtp.so.
    pub htp: PathBuf,
    /// libQnnSystem.so; `None` takes the one beside `htp`.
    pub system: Option<PathBuf>,
    /// The device's Hexagon architecture, where the library's own word is not to be taken.
    pub device_arch: Option<u32>,
    /// True if the library emulates the NPU, so that nothing it says of the chip counts; `None` goes by this machine.
    pub emulated: Option<bool>,
    /// Level of the library's log, which goes through `tracing` with target `qnn`.
    pub log: LogLevel,
    /// Level of profiling; read the records with [`QnnBackend::take_profile`].
    pub profile: ProfileLevel,
    /// Trace that the measurements are written to instead.
    pub trace: Option<Arc<Trace>>,
    /// Power mode to vote for while the backend is open.
    pub perf: PerfMode,
    /// Take that vote back while nothing has executed for this long; the next execution asks again.
    pub idle_release: Option<Duration>,
    /// Scheduling priority of the contexts.
    pub priority: Priority,
    /// Memory that inputs and outputs lie in.
    pub memory: MemoryMode,
    /// libcdsprpc.so; `None` takes the device's.
    pub cdsprpc: Option<PathBuf>,
    /// Number of contexts of a bundle that are opened at a time; `None` leaves it to the backend.
    pub open_threads: Option<u16>,
    /// Contexts of a bundle share one buffer for what does not fit the tightly coupled memory; `None`
    /// does so on a device.
    pub share_spill_fill: Option<bool>,
    /// Limits how many MB of a file the library keeps in memory while it loads it.
    pub read_budget_mb: Option<u64>,
    /// File that remembers which context binaries crashed a child process: see [`super::probe`].
    pub tried: Option<PathBuf>,
}

/// Executes context binaries on the NPU, or on the library's emulator of it.
pub struct QnnBackend {
    sessions: Sessions,
    platform: Platform,
    memory: Arc<DeviceMemory>,
    options: QnnOptions,
    records: Arc<Mutex<Records>>,
    /// Folders of bundles that run slower than they could, of which that was said.
    warned: Mutex<HashSet<PathBuf>>,
}

impl QnnBackend {
    /// Opens the libraries and the device.
    ///
    /// The libraries print to standard output when they are loaded: see [`super::stdout`].
    ///
    /// # Errors
    /// When a library does not load, or the device does not open.
    pub fn new(options: QnnOptions) -> Result<Self> {
        let library = Library::open(&options.htp, options.system.as_deref())?;
        Self::with_library(&library, options)
    }

    /// Opens the device of a library that is open already; the paths in `options` are not used.
    ///
    /// # Errors
    /// When the device does not open.
    pub fn with_library(library: &Library, options: QnnOptions) -> Result<Self> {
        let sessions = Sessions::open(
            library,
            SessionOptions {
                log: options.log,
                perf: options.perf,
                idle_release: options.idle_release,
            },
        )?;
        let mut platform = sessions.current()?.device.platform().unwrap_or_else(|error| {
            tracing::warn!(target: "qnn", error = %error.report(), "the library does not describe the device");
            let emulated = Platform::is_emulated();
            Platform { arch: None, soc: None, vtcm_mb: None, cores: 0, emulated }
        });
        platform.emulated = options.emulated.unwrap_or(platform.emulated);
        let cdsprpc = options.cdsprpc.as_deref();
        let memory = DeviceMemory::open(options.memory, cdsprpc, library, platform.emulated)?;
        let memory = Arc::new(memory);
        let warned = Mutex::default();
        Ok(Self { sessions, platform, memory, options, records: Arc::default(), warned })
    }

    /// The opened library.
    pub fn library(&self) -> &Library {
        self.sessions.library()
    }

    /// The library's report about the machine.
    pub fn platform(&self) -> &Platform {
        &self.platform
    }

    /// The device in a line: its architecture and chip.
    fn describe_device(&self) -> String {
        if self.platform.emulated {
            return "emulator: executes binaries of every architecture".to_owned();
        }
        let number = |n: Option<u32>| n.map_or("unknown".to_owned(), |n| n.to_string());
        format!(
            "device v{}, soc {}",
            number(self.options.device_arch.or(self.platform.arch)),
            number(self.platform.soc)
        )
    }

    /// Votes for another power mode, such as [`PerfMode::DeviceDefault`] while idle.
    ///
    /// # Errors
    /// When the device refuses the vote.
    pub fn set_perf(&self, mode: PerfMode) -> Result<()> {
        self.sessions.set_mode(mode)
    }

    /// In a few words, where inputs and outputs lie, and why they are not registered where they are
    /// not.
    pub fn memory(&self) -> String {
        self.memory.describe()
    }

    /// Profile records since the last call, at most the newest 131,072 events.
    pub fn take_profile(&self) -> Vec<ProfileRecord> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A context whose file was read and found fit, before it is loaded.
struct Prepared<'a> {
    source: &'a ContextSource,
    name: String,
    file: Mapped,
    info: BinaryInfo,
    graphs: Vec<Arc<GraphInfo>>,
}

impl QnnBackend {
    fn prepare<'a>(&self, source: &'a ContextSource) -> Result<Prepared<'a>> {
        let Some(path) = &source.binary else {
            return Err(Error::new(
                ErrorKind::Context,
                format!("context {:?} has no context binary", source.key),
            )
            .hint("this bundle runs on the CPU backend only"));
        };
        let name = path.display().to_string();
        let file = source.open(path)?;
        let info = BinaryInfo::open(self.library().system(), &file, self.options.tried.as_deref())?;
        let arch = self.options.device_arch;
        let (core, htp) = (self.library().core_version(), self.library().backend_version());
        let destination = Destination::new(&self.platform, arch, core, htp);
        if let Verdict::Supported { reason, hint } = preflight(&name, &info, &destination)? {
            self.warn_once(path.parent().unwrap_or(path), &reason, &hint);
        }
        let graphs =
            info.graphs.iter().map(|g| g.info().map(Arc::new)).collect::<Result<Vec<_>>>()?;
        Ok(Prepared { source, name, file, info, graphs })
    }

    /// Says of a bundle that it runs slower than it could, however many contexts it has and however often they are
    /// loaded.
    fn warn_once(&self, bundle: &Path, reason: &str, hint: &str) {
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        if warned.insert(bundle.to_owned()) {
            tracing::warn!("{}: {reason}; {hint}", bundle.display());
        }
    }

    /// Loads a context, and returns whether it shares its spill-fill buffer as was asked for.
    fn create(
        &self,
        session: &Session,
        prepared: Prepared<'_>,
        spill_fill: Option<&SpillFill>,
    ) -> Result<(QnnContext, bool)> {
        let Prepared { source, name, file, info, graphs } = prepared;
        let mut configs = Vec::new();
        if self.options.priority != Priority::Normal {
            configs.push(ContextConfig::Priority(self.options.priority));
        }
        configs.extend(self.options.read_budget_mb.map(ContextConfig::FileReadBudgetMb));
        let profile = Profile::create(&session.device, self.options.profile)?;
        let start = profile.as_ref().map(|_| Instant::now());
        let attempt = format!("{name}: loading context {:?}", source.key);
        let load = |spill_fill| {
            let (device, bytes) = (&session.device, file.bytes());
            ContextHandle::from_binary(
                device,
                &configs,
                spill_fill,
                bytes,
                profile.as_ref(),
                &attempt,
            )
        };
        let mut shares = spill_fill.is_some();
        let handle = match load(spill_fill) {
            Err(error) if shares => {
                tracing::debug!("no spill-fill buffer is shared: {}", error.message());
                shares = false;
                load(None)?
            }
            handle => handle?,
        };
        drop(file);
        let handle = Arc::new(handle);
        session.device.opened(&handle);
        let recorder = Recorder::new(&source.key, &self.records, self.options.trace.as_ref());
        if let (Some(profile), Some(start)) = (&profile, start) {
            recorder.record(None, profile, start);
        }
        let batched: Vec<_> = graphs.iter().map(|info| batched(info, &graphs)).collect();
        let mut places = Vec::with_capacity(graphs.len());
        let (mut single, mut tensors, mut batches) = (Vec::new(), Vec::new(), Vec::new());
        for ((info, graph), found) in graphs.into_iter().zip(info.graphs).zip(batched) {
            let graph = GraphTensors { inputs: graph.inputs, outputs: graph.outputs };
            places.push(single.len());
            match found {
                None => {
                    single.push(info);
                    tensors.push(graph);
                }
                Some((of, places)) => batches.push(Batched { of, info, tensors: graph, places }),
            }
        }
        for batch in &mut batches {
            batch.of = places.get(batch.of).copied().unwrap_or(usize::MAX);
        }
        let context = QnnContext {
            handle,
            memory: Arc::clone(&self.memory),
            power: self.options.idle_release.map(|_| Arc::clone(&session.power)),
            graphs: single,
            tensors,
            batches,
            profile: self.options.profile,
            recorder,
            resident: info.file_bytes,
        };
        Ok((context, shares))
    }

    /// Number of contexts that are opened at a time.
    fn open_threads(&self) -> usize {
        // The emulator takes all of the processor for one context.
        if self.platform.emulated {
            return 1;
        }
        std::thread::available_parallelism().map_or(1, usize::from).min(opening::MAX_CONCURRENT)
    }

    fn shares_spill_fill(&self) -> bool {
        // The emulator refuses it.
        self.options.share_spill_fill.unwrap_or(!self.platform.emulated)
    }
}

impl fmt::Debug for QnnBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QnnBackend")
            .field("library", self.library())
            .field("platform", &self.platform)
            .finish_non_exhaustive()
    }
}

impl Backend for QnnBackend {
    fn info(&self) -> BackendInfo {
        let library = self.library();
        let mut details = vec![
            format!("library {}", library.path().display()),
            format!(
                "core interface {}, HTP interface {}, system interface {}",
                library.core_version(),
                library.backend_version(),
                library.system().version()
            ),
        ];
        details.push(self.describe_device());
        details.push(match self.sessions.votes() {
            true => format!("power mode: {}", self.options.perf.name()),
            false => "power mode: left to the device".to_owned(),
        });
        details.push(format!("memory: {}", self.memory.describe()));
        let version = match library.core_version().qairt() {
            Some(qairt) => format!("QAIRT {qairt}, build {}", library.build_id()),
            None => library.build_id().to_owned(),
        };
        BackendInfo { name: "qnn".to_owned(), version, details }
    }

    fn accepts(&self, source: &ContextSource) -> bool {
        source.binary.is_some()
    }

    fn device(&self) -> Option<String> {
        Some(self.describe_device())
    }

    fn emulates(&self) -> bool {
        self.platform.emulated
    }

    fn conditions(&self) -> Vec<String> {
        let mut known = self.sessions.conditions();
        known.extend(thermal::npu_zones(Path::new(thermal::ZONES)));
        known
    }

    fn open_context(&self, source: &ContextSource) -> Result<Arc<dyn Context>> {
        let session = self.sessions.current()?;
        let _working = session.power.working();
        let (context, _) = self.create(&session, self.prepare(source)?, None)?;
        Ok(Arc::new(context))
    }

    fn open_contexts(&self, sources: &[ContextSource]) -> Result<Vec<Opened>> {
        let session = self.sessions.current()?;
        let _working = session.power.working();
        let threads = self.options.open_threads.map_or_else(|| self.open_threads(), usize::from);
        let prepare = |source| {
            let start = Instant::now();
            Ok((self.prepare(source)?, start.elapsed()))
        };
        let mut rest = side_by_side(threads, sources.iter().collect(), prepare)?;
        let create = |(prepared, time): (Prepared<'_>, Duration), group: Option<&SpillFill>| {
            let start = Instant::now();
            let (context, shares) = self.create(&session, prepared, group)?;
            Ok((context, shares, time + start.elapsed()))
        };
        let opened = |(context, _, time): (QnnContext, bool, Duration)| Opened {
            context: Arc::new(context),
            time,
        };
        // Who has the buffer that all use comes first, alone.
        let needs: Vec<_> = rest.iter().map(|(p, _)| opening::spill_fill(&p.info)).collect();
        let leader = opening::leader(&needs).filter(|_| self.shares_spill_fill());
        let Some((index, bytes)) = leader else {
            let contexts = side_by_side(threads, rest, |prepared| create(prepared, None))?;
            return Ok(contexts.into_iter().map(opened).collect());
        };
        let leader = create(rest.remove(index), Some(&SpillFill { leader: None, bytes }))?;
        let (context, shares, _) = &leader;
        let group = shares.then(|| SpillFill { leader: Some(Arc::clone(&context.handle)), bytes });
        let mut contexts =
            side_by_side(threads, rest, |prepared| create(prepared, group.as_ref()))?;
        contexts.insert(index, leader);
        Ok(contexts.into_iter().map(opened).collect())
    }

    fn is_out_of_memory(&self, error: &Error) -> bool {
        error.code() == Some(codes::MEM_ALLOC)
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        self.memory.allocate(bytes)
    }
}

struct QnnContext {
    handle: Arc<ContextHandle>,
    memory: Arc<DeviceMemory>,
    /// Notified of executions.
    power: Option<Arc<Power>>,
    graphs: Vec<Arc<GraphInfo>>,
    tensors: Vec<GraphTensors>,
    /// Graphs that do the work of others for several sequences.
    batches: Vec<Batched>,
    profile: ProfileLevel,
    recorder: Recorder,
    resident: u64,
}

/// A graph for several sequences.
struct Batched {
    /// Index of the graph for one.
    of: usize,
    info: Arc<GraphInfo>,
    tensors: GraphTensors,
    places: Places,
}

impl QnnContext {
    fn open(&self, info: &Arc<GraphInfo>, tensors: &GraphTensors) -> Result<QnnGraph> {
        let recorder = self.recorder.clone();
        let services =
            Services { memory: Arc::clone(&self.memory), power: self.power.clone(), recorder };
        QnnGraph::open(&self.handle, info, tensors, services, self.profile)
    }
}

impl Context for QnnContext {
    fn graphs(&self) -> &[Arc<GraphInfo>] {
        &self.graphs
    }

    fn open_graph(&self, index: usize) -> Result<Box<dyn Graph>> {
        let (Some(info), Some(tensors)) = (self.graphs.get(index), self.tensors.get(index)) else {
            return Err(Error::new(
                ErrorKind::Internal,
                format!("graph {index} of a context with {}", self.graphs.len()),
            ));
        };
        Ok(Box::new(self.open(info, tensors)?))
    }

    fn open_batch(&self, index: usize) -> Result<Option<Box<dyn Batch>>> {
        let of_graph = self.batches.iter().filter(|batch| batch.of == index);
        let graphs = of_graph.map(|Batched { info, tensors, places, .. }| {
            Ok((self.open(info, tensors)?, places.clone()))
        });
        let graphs = graphs.collect::<Result<Vec<_>>>()?;
        let Some(one) = self.graphs.get(index).filter(|_| !graphs.is_empty()) else {
            return Ok(None);
        };
        Ok(Some(Box::new(QnnBatch::new(graphs, one, Arc::clone(&self.memory))?)))
    }

    fn resident_bytes(&self) -> u64 {
        self.resident
    }
}
