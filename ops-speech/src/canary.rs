//! `canary_transcribe`: samples to the frames of Canary's encoder, which are those of Parakeet.

use qhx_kit::OneOrMany;
use qhx_kit::audio::{Clip, FrontEnd};
use qhx_kit::fill::FloatInput;
use qhx_op::{Error, GraphId, Host, Result};
use serde::Deserialize;

use crate::dictation::{Dictation, Family};
use crate::features::Features;
use crate::listener::Ear;

const ENCODER: &str = "/plan/params/encoder";

/// Speech to text by Canary, in many languages, and translated.
pub type Canary = Dictation<Mels>;

/// `params.audio` of the manifest.
#[derive(Debug, Deserialize)]
struct AudioParams {
    front_end: FrontEnd,
    #[serde(default)]
    preemphasis: f32,
}

/// Normalised log-mel frames of a clip, for the shortest graph that holds it.
#[derive(Debug)]
pub struct Mels {
    features: Features,
    /// The shortest first.
    windows: Vec<Window>,
}

/// A graph of the encoder.
#[derive(Debug)]
struct Window {
    graph: GraphId,
    /// Frames that it takes.
    frames: usize,
    mel: FloatInput,
    keep: FloatInput,
}

impl Family for Mels {
    const NAME: &'static str = "canary_transcribe";
    const SUMMARY: &'static str = "Speech to text by Canary, with translation";
    const INPUTS: &'static [&'static str] = &["mel", "keep"];

    fn open(host: &mut Host) -> Result<Self> {
        #[derive(Deserialize)]
        struct Params {
            encoder: OneOrMany,
        }
        let Params { encoder } = host.params()?;
        let AudioParams { front_end, preemphasis } = host.require("/params/audio")?;
        let features = Features::new(front_end, preemphasis)?;
        let mut windows = Vec::new();
        for graph in encoder.graphs(host, ENCODER)? {
            let (frames, mels) = {
                let port = host.input(graph, "mel")?;
                host.rows_of(graph, port)?
            };
            let mel = FloatInput::require(host, graph, "mel")?;
            let keep = FloatInput::require(host, graph, "keep")?;
            if mels != features.mels() || keep.len() != frames || frames == 0 {
                return Err(Error::graph(format!(
                    "graph {:?}: {frames} frames of {mels} mels and {} values of keep; expected {} mels as \
                     params.audio.front_end makes them, and a value for each frame",
                    host.graph(graph).name,
                    keep.len(),
                    features.mels()
                )));
            }
            windows.push(Window { graph, frames, mel, keep });
        }
        windows.sort_by_key(|window| window.frames);
        Ok(Self { features, windows })
    }
}

impl Ear for Mels {
    fn graphs(&self) -> Vec<GraphId> {
        self.windows.iter().map(|window| window.graph).collect()
    }

    fn rate(&self) -> u32 {
        self.features.front_end().rate
    }

    fn most(&self) -> usize {
        let longest = self.windows.last().map_or(0, |window| window.frames);
        longest.saturating_mul(self.features.front_end().hop)
    }

    fn write(&mut self, host: &mut Host, clip: Clip<'_>) -> Result<GraphId> {
        let FrontEnd { rate, hop, .. } = *self.features.front_end();
        let mut samples = clip.samples().to_vec();
        // Less than a frame is said in silence.
        samples.resize(samples.len().max(hop), 0.0);
        let clip = Clip::new(&samples, rate, rate)?;
        let frames = self.features.frames(clip);
        let Some(window) = self.windows.iter().find(|window| window.frames >= frames) else {
            let most = self.windows.last().map_or(0, |window| window.frames);
            return Err(Error::prompt(format!(
                "audio of {frames} frames, the encoder takes {most}"
            )));
        };
        let mels = self.features.mels();
        let mut rows = vec![0.0; window.frames * mels];
        self.features.write(clip, &mut rows)?;
        host.dump_values("mel", &rows, &[window.frames, mels])?;
        window.mel.write(host, &rows)?;
        let keep: Vec<f32> =
            (0..window.frames).map(|at| f32::from(u8::from(at < frames))).collect();
        window.keep.write(host, &keep)?;
        Ok(window.graph)
    }
}
