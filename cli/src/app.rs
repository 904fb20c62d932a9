//! State that every command works with.

use std::sync::Arc;

use qhx::{Runtime, RuntimeBuilder};
use qhx_base::Result;
use qhx_plugins::{PluginOptions, Plugins, Prober};
use qhx_terminal::{Terminal, helper};

use crate::args::{BackendArgs, GlobalArgs};
use crate::emulator;
use crate::output::Output;
use crate::program::this_program;
use crate::progress::PromptProgress;
use crate::signal::Interrupts;
use crate::trace::Tracing;

/// State that every command works with.
pub(crate) struct App {
    pub output: Output,
    pub interrupts: Interrupts,
    pub global: GlobalArgs,
    pub progress: PromptProgress,
}

impl AsMut<Output> for App {
    fn as_mut(&mut self) -> &mut Output {
        &mut self.output
    }
}

impl App {
    /// Parts of it that the commands of other crates work with.
    pub(crate) fn terminal(&mut self) -> Terminal<'_> {
        Terminal {
            output: &mut self.output,
            interrupts: &self.interrupts,
            process: &self.global.process,
        }
    }

    /// The host-ops: those linked in and those of plugins.
    pub(crate) fn plugins(&self) -> Result<Plugins> {
        Plugins::discover(&self.plugin_options())
    }

    /// Runtime that opens bundles, as the options ask.
    pub(crate) fn runtime(
        &self,
        backend: &BackendArgs,
        tracing: Option<&Tracing>,
    ) -> RuntimeBuilder {
        let mut device = backend.device.options().idle_release(backend.idle_release);
        if let Some(tracing) = tracing {
            device = device.profile(tracing.level);
        }
        let mut runtime = Runtime::builder()
            .backend(backend.backend)
            .libraries(backend.libraries.files())
            .device(device)
            .unverified(backend.unverified)
            .cpu_activations(self.global.cpu_activations)
            .cpu_caches(self.global.cpu_caches)
            .plugins(self.plugin_options())
            .executed(emulator::tap())
            .cancel(self.interrupts.token().clone());
        if let Some(max) = backend.max_contexts {
            runtime = runtime.max_contexts(max.into());
        }
        if let Some(threads) = self.global.process.threads() {
            runtime = runtime.threads(threads);
        }
        if let Some(progress) = self.progress.function() {
            runtime = runtime.progress(progress);
        }
        if let Some(tracing) = tracing {
            runtime = runtime.trace(Arc::clone(&tracing.trace));
        }
        runtime
    }

    /// Which plugins to consider, and how. A plugin that is not installed is tried in a child
    /// process first: this program as a helper.
    pub(crate) fn plugin_options(&self) -> PluginOptions {
        let prober = this_program().map(|program| {
            Prober::new(program, [helper::COMMAND]).remembering(qhx_plugins::search::memory_file())
        });
        PluginOptions::default()
            .files(self.global.plugins.clone())
            .dirs(self.global.plugin_dirs.clone())
            .no_plugins(self.global.no_plugins)
            .allow_untrusted(self.global.allow_untrusted_plugins)
            .prober(prober)
    }
}
