//! Runtime that opens bundles: backend, libraries, plugins, threads.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx_base::trace::Trace;
use qhx_base::{CancelToken, Result, setters};
use qhx_core::dump::Dump;
use qhx_core::engine::{Model, ModelOptions};
use qhx_core::op::{OpDescription, OpProvider as _, ProgressFn};
use qhx_cpu::{Activations, Caches};
use qhx_exec::backend::Backend;
use qhx_exec::workspace::Tap;
use qhx_plugins::{PluginOptions, Plugins};

use crate::backends::{Chosen, cpu};
use crate::bundle::Bundle;
use crate::folders;
use crate::golden::first_open;
use crate::hub;
use crate::libraries::LibraryFiles;
use crate::settings::{BackendChoice, DecodeOn, DeviceOptions, Settings};

/// Runtime that bundles are opened with. It is cheap to make and to clone, and opens nothing by itself.
///
/// ```
/// let runtime = qhx::Runtime::builder().backend(qhx::BackendChoice::Cpu).threads(2).build();
/// # let _ = runtime;
/// ```
#[derive(Clone, Default)]
pub struct Runtime {
    settings: Settings,
}

impl std::fmt::Debug for Runtime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Runtime")
            .field("backend", &self.settings.backend)
            .field("libraries", &self.settings.libraries)
            .field("device", &self.settings.device)
            .field("threads", &self.settings.threads)
            .field("plugins", &self.settings.plugins)
            .finish_non_exhaustive()
    }
}

impl Runtime {
    /// Begins with the defaults: backend, libraries and plugins are found.
    pub fn builder() -> RuntimeBuilder {
        RuntimeBuilder::default()
    }

    /// Reads the manifest of a bundle, as [`Bundle::open_with_root`]. In a folder with the bundles of several
    /// architectures (`v73`, `v79`, …) it takes the one of the device's architecture, otherwise the newest that the
    /// device runs. If there is no device, as on the CPU or on an emulator, it takes the newest of all.
    ///
    /// If nothing is at `path`, it may be the name of a bundle that was fetched from a [`hub`].
    ///
    /// # Errors
    /// When there is no manifest, or it is invalid; when the device runs none of several bundles.
    pub fn bundle(&self, path: impl AsRef<Path>, root: Option<&Path>) -> Result<Bundle> {
        let (given, arch) = (path.as_ref(), || self.settings.device_arch());
        let path = folders::resolve(&hub::resolve_for(given, arch)?, arch)?;
        Bundle::open_one(&path, root).map_err(|e| hub::how_to_fetch(given, e))
    }

    /// Architecture of the device that bundles are opened for, such as 81 for v81. `None` where there is none that can
    /// be opened, on the CPU, and on an emulator.
    pub fn device_arch(&self) -> Option<u32> {
        self.settings.device_arch()
    }

    /// The same, with [`RuntimeBuilder::batching`] on or off.
    #[must_use]
    pub fn batching(mut self, on: bool) -> Self {
        self.settings.batching = on;
        self
    }

    /// The QNN libraries, as far as they are named.
    pub fn libraries(&self) -> &LibraryFiles {
        &self.settings.libraries
    }

    /// Options of the device.
    pub fn device(&self) -> &DeviceOptions {
        &self.settings.device
    }

    /// Places of plugins, as far as they are named.
    pub fn plugin_options(&self) -> &PluginOptions {
        &self.settings.plugins
    }

    /// The host-ops: those linked in and those of plugins.
    ///
    /// # Errors
    /// When a plugin that is named cannot be loaded.
    pub fn plugins(&self) -> Result<Plugins> {
        Plugins::discover(&self.settings.plugins)
    }

    /// Description of the host-op that a bundle names, without opening the bundle.
    ///
    /// # Errors
    /// When the host-op is not found.
    pub fn host_op(&self, bundle: &Bundle) -> Result<OpDescription> {
        Ok(self.plugins()?.find(bundle.manifest().host_op()?)?.description)
    }

    /// Decides what executes the graphs of a bundle, and opens it.
    ///
    /// # Errors
    /// When the backend that is asked for cannot be opened, or nothing here can execute the bundle.
    pub fn choose(&self, bundle: &Bundle) -> Result<Chosen> {
        let bundle = self.settings.prepared(bundle)?;
        self.settings.choose(bundle.manifest())
    }

    /// Opens a bundle: finds its host-op, loads its contexts and its tokenizer.
    ///
    /// # Errors
    /// When the host-op is not found, nothing here can execute the graphs, or anything in the bundle is missing or
    /// invalid.
    pub fn load(&self, bundle: &Bundle) -> Result<Model> {
        self.load_checked(bundle, |_| Ok(()), |_, _| {})
    }

    /// Same as [`Runtime::load`], with two callbacks. `check` is called with the host-op before a library is opened.
    /// `chosen` is called with the backend and the reason for it before contexts are loaded.
    ///
    /// # Errors
    /// Errors of [`Runtime::load`], and any error of `check`.
    pub fn load_checked(
        &self,
        bundle: &Bundle,
        check: impl FnOnce(&OpDescription) -> Result<()>,
        chosen: impl FnOnce(&dyn Backend, &str),
    ) -> Result<Model> {
        let settings = &self.settings;
        let ops = self.plugins()?;
        let manifest = bundle.shared_manifest();
        // Before libraries are opened: the name is wrong more often than they are.
        let entry = ops.find(manifest.host_op()?)?;
        check(&entry.description)?;
        let bundle = settings.prepared(bundle)?;
        let manifest = bundle.shared_manifest();
        let choice = settings.choose(manifest)?;
        chosen(&*choice.backend, &choice.reason);
        let mut model = Model::open(
            ModelOptions::new(Arc::clone(manifest), choice.backend, &ops)
                .threads(settings.threads)
                .cancelled_by(settings.cancel.clone())
                .progress(settings.progress.clone())
                .dump(settings.dump.clone())
                .trace(settings.trace.clone())
                .executed(settings.executed.clone())
                .keep_states(settings.keep_states)
                .batching(settings.batching),
        )?;
        if !settings.unverified {
            first_open(&mut model, || cpu(settings.threads))?;
        }
        if let Some(on) = settings.decode_on {
            settings.decode_on(on, &mut model)?;
        }
        tracing::info!(
            op = %model.op().description.name,
            backend = %model.backend().name,
            activations = model.backend().activations(),
            caches = model.backend().caches(),
            reason = %choice.reason,
            decoder = model.decoder().map(|decoder| format!("{} ({})", decoder.backend.name, decoder.reason)),
            "bundle open"
        );
        Ok(model)
    }
}

/// Makes a [`Runtime`].
#[derive(Clone, Default)]
pub struct RuntimeBuilder {
    settings: Settings,
}

impl std::fmt::Debug for RuntimeBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RuntimeBuilder").finish_non_exhaustive()
    }
}

impl RuntimeBuilder {
    setters! {
        /// Backend that executes graphs; [`BackendChoice::Auto`] by default.
        backend(backend: BackendChoice) => settings.backend = backend,
        /// Has an open backend execute the graphs, whatever [`RuntimeBuilder::backend`] asks for: one of the caller's
        /// own, or one over another.
        executed_by(backend: Arc<dyn Backend>) => settings.given = Some(backend),
        /// The QNN libraries; the installed ones, or else those beside the program by default.
        libraries(files: LibraryFiles) => settings.libraries = files,
        /// Options for the NPU.
        device(device: DeviceOptions) => settings.device = device,
        /// Keeps at most `max` contexts loaded, and loads the others when their turn comes; all by default.
        max_contexts(max: usize) => settings.max_contexts = Some(max),
        /// Opens bundles whose golden steps give wrong answers on this device, too: they are not run. By default the
        /// shortest is run when a bundle is opened for the first time with these libraries on this device, and a bundle
        /// that fails is refused. The CPU is not asked, and bundles without [golden steps](crate::golden) open as they
        /// are.
        unverified(unverified: bool) => settings.unverified = unverified,
        /// Backend that decodes when the NPU runs prefill: the CPU often takes less time for a token of a small model.
        /// The state is handed over once after each prompt; see [`Model::decode_on`]. Bundles that do not generate open
        /// as they are. By default one backend runs both. [`Model::decoder`] reports the choice and the reason.
        decode_on(on: DecodeOn) => settings.decode_on = Some(on),
        /// Has the program `qhx` prepare a portable bundle of which nothing is prepared for this chip and these
        /// libraries, in a process of its own, while the CPU answers. That process outlives this one. What is opened
        /// once it is done runs on the NPU; the reason of [`Runtime::choose`] names the process and the file that it
        /// reports to. By default, and with another choice than [`BackendChoice::Auto`], nothing is started.
        while_preparing(qhx: impl Into<PathBuf>) => settings.while_preparing = Some(qhx.into()),
        /// Threads for the host's part and for the CPU backend; one a core by default.
        threads(threads: usize) => settings.threads = Some(threads),
        /// Precision that the CPU backend rounds activations to in matmuls with int8 and 4-bit weights; by default 8
        /// bits with 4-bit weights, but for tokens with outliers, and 16 with int8. 8 bits are faster and less exact. `activations` of
        /// [`Model::backend`]'s details reports the precision.
        cpu_activations(activations: Activations) => settings.cpu_activations = activations,
        /// Format of the CPU backend's KV caches; f16 by default, as on an NPU. f32 takes twice the memory and, for a
        /// token after thousands of others, up to twice the time spent on the caches. `caches` of
        /// [`Model::backend`]'s details reports the format.
        cpu_caches(caches: Caches) => settings.cpu_caches = caches,
        /// Plugins to consider, and how. By default those of the user's folder and those beside the program
        /// are found, and loaded without being tried in a process of their own: a library starts no processes unasked.
        plugins(plugins: PluginOptions) => settings.plugins = plugins,
        /// Ends all that is done with models of this runtime, now and later, within one graph execution.
        cancel(cancel: CancelToken) => settings.cancel = cancel,
        /// Called with (positions consumed, total) while a prompt is consumed.
        progress(progress: ProgressFn) => settings.progress = Some(progress),
        /// Called after each execution of a graph that succeeded, those of a first golden step included.
        executed(tap: Tap) => settings.executed = Some(tap),
        /// Dump that receives arrays of the model.
        dump(dump: Arc<Dump>) => settings.dump = Some(dump),
        /// Trace that records what was done and when.
        trace(trace: Arc<Trace>) => settings.trace = Some(trace),
        /// Memory for states of earlier conversations in each model, in bytes: see [`ModelOptions::keep_states`].
        keep_states(bytes: usize) => settings.keep_states = bytes,
        /// Has sessions of a model that generate at the same time take their steps together: see
        /// [`ModelOptions::batching`].
        batching(on: bool) => settings.batching = on,
    }

    /// The runtime.
    pub fn build(self) -> Runtime {
        Runtime { settings: self.settings }
    }
}
