//! Sizes of a voice: of `config.json` of a `VitsModel`; of a voice of Piper by the shapes of its tensors.

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use serde_json::{Value, json};

use super::names::other;
use crate::kit::Reader;

/// Largest number of layers, of flows and of stages.
const MAX_LAYERS: usize = 64;
/// Largest width.
const MAX_WIDTH: usize = 1 << 13;
/// Largest kernel, dilation and rate.
const MAX_REACH: usize = 64;

/// Sizes of the network.
#[derive(Debug, Clone)]
pub(super) struct Config {
    /// Symbols of the vocabulary.
    pub(super) tokens: usize,
    pub(super) hidden: usize,
    pub(super) layers: usize,
    pub(super) heads: usize,
    /// Distance up to which positions have embeddings of their own.
    pub(super) window: usize,
    pub(super) inner: usize,
    /// Kernel of the encoder's convolutions.
    pub(super) kernel: usize,
    /// Biases of the attention's projections.
    pub(super) biased: bool,
    pub(super) eps: f32,
    /// Channels of a frame.
    pub(super) flow: usize,
    pub(super) speakers: usize,
    /// Width of a speaker's embedding; 0 where there are none.
    pub(super) speaker: usize,
    pub(super) durations: Durations,
    pub(super) couplings: usize,
    pub(super) wavenet: Wavenet,
    pub(super) decoder: Decoder,
    /// Samples of a second.
    pub(super) rate: usize,
    /// Length of a symbol, times the model's own.
    pub(super) length: f64,
    /// Deviations of the noise of frames and of durations.
    pub(super) noise: [f64; 2],
}

/// The duration predictor.
#[derive(Debug, Clone, Copy)]
pub(super) enum Durations {
    /// Flows over noise.
    Stochastic { kernel: usize, layers: usize, flows: usize, bins: usize, tail: f64 },
    /// Convolutions.
    Plain { inner: usize, kernel: usize },
}

/// The convolutions of a coupling.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wavenet {
    pub(super) layers: usize,
    pub(super) kernel: usize,
    /// Each layer's dilation, times that of the one before.
    pub(super) dilation: usize,
}

/// The vocoder, HiFi-GAN.
#[derive(Debug, Clone)]
pub(super) struct Decoder {
    /// Channels that it begins with.
    pub(super) initial: usize,
    pub(super) rates: Vec<usize>,
    /// Kernels and dilations of the residual blocks.
    pub(super) blocks: Vec<(usize, Vec<usize>)>,
    /// True where a second convolution follows each of a block.
    pub(super) paired: bool,
    pub(super) slope: f32,
}

impl Config {
    /// The sizes of a `VitsModel`.
    pub(super) fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader::whole(checkpoint);
        let width = |key: &str, default: usize| {
            reader.size_or(key, default).and_then(|n| bounded(&reader, key, n, MAX_WIDTH))
        };
        let small = |key: &str, default: usize| {
            reader.size_or(key, default).and_then(|n| bounded(&reader, key, n, MAX_LAYERS))
        };
        let number = |key: &str, default: f64| match reader.get(key) {
            None => Ok(default),
            Some(found) => found
                .as_f64()
                .filter(|n| (0.0..=16.0).contains(n))
                .ok_or_else(|| reader.bad(key, found, "a number from 0 to 16")),
        };
        let list = |key: &str, default: Value| -> Result<Vec<usize>> {
            let found = reader.get(key).unwrap_or(&default);
            sizes(found).ok_or_else(|| reader.bad(key, found, "a list of numbers from 1 to 64"))
        };
        reader.only("hidden_act", &json!("relu"))?;
        let speaker = match reader.get("speaker_embedding_size") {
            None => 0,
            Some(found) if found == 0 => 0,
            Some(_) => reader.bounded("speaker_embedding_size", MAX_WIDTH)?,
        };
        let speakers = reader.size_or("num_speakers", 1)?;
        if (speaker == 0) != (speakers == 1) || speakers > 1 << 16 {
            return Err(reader.fault(format!(
                "num_speakers {speakers}, speaker_embedding_size {speaker}: expected several speakers with an \
                 embedding, or one without"
            )));
        }
        let window = match reader.get("window_size") {
            None => 4,
            Some(_) => reader.bounded("window_size", MAX_REACH)?,
        };
        let durations = match reader.flag_or("use_stochastic_duration_prediction", true)? {
            true => Durations::Stochastic {
                kernel: small("duration_predictor_kernel_size", 3)?,
                layers: small("depth_separable_num_layers", 3)?,
                flows: small("duration_predictor_num_flows", 4)?,
                bins: small("duration_predictor_flow_bins", 10)?,
                tail: number("duration_predictor_tail_bound", 5.0)?,
            },
            false => Durations::Plain {
                inner: width("duration_predictor_filter_channels", 256)?,
                kernel: small("duration_predictor_kernel_size", 3)?,
            },
        };
        reader.only("depth_separable_channels", &json!(2))?;
        let rates = list("upsample_rates", json!([8, 8, 2, 2]))?;
        let kernels = list("upsample_kernel_sizes", json!([16, 16, 4, 4]))?;
        let key = "resblock_dilation_sizes";
        let default = json!([[1, 3, 5], [1, 3, 5], [1, 3, 5]]);
        let found = reader.get(key).unwrap_or(&default);
        let dilations =
            found.as_array().map(|all| all.iter().map(sizes).collect::<Option<Vec<_>>>());
        let dilations = dilations
            .flatten()
            .ok_or_else(|| reader.bad(key, found, "lists of numbers from 1 to 64"))?;
        let block_kernels = list("resblock_kernel_sizes", json!([3, 7, 11]))?;
        if block_kernels.len() != dilations.len() {
            return Err(reader.bad(key, found, "one list for each of resblock_kernel_sizes"));
        }
        let speaking = number("speaking_rate", 1.0)?;
        if speaking <= 0.0 {
            return Err(
                reader.fault(format!("speaking_rate {speaking}: expected a number above 0"))
            );
        }
        let config = Self {
            tokens: reader.size_or("vocab_size", 38)?,
            hidden: width("hidden_size", 192)?,
            layers: reader.layers_or(6)?,
            heads: small("num_attention_heads", 2)?,
            window,
            inner: width("ffn_dim", 768)?,
            kernel: small("ffn_kernel_size", 3)?,
            biased: reader.flag_or("use_bias", true)?,
            eps: reader.epsilon(&["layer_norm_eps"], 1e-5)?,
            flow: width("flow_size", 192)?,
            speakers,
            speaker,
            durations,
            couplings: small("prior_encoder_num_flows", 4)?,
            wavenet: Wavenet {
                layers: small("prior_encoder_num_wavenet_layers", 4)?,
                kernel: small("wavenet_kernel_size", 5)?,
                dilation: small("wavenet_dilation_rate", 1)?,
            },
            decoder: Decoder {
                initial: width("upsample_initial_channel", 512)?,
                rates,
                blocks: block_kernels.into_iter().zip(dilations).collect(),
                paired: true,
                slope: number("leaky_relu_slope", 0.1)? as f32,
            },
            rate: reader.size_or("sampling_rate", 16_000)?,
            length: 1.0 / speaking,
            noise: [number("noise_scale", 0.667)?, number("noise_scale_duration", 0.8)?],
        };
        config.checked(&kernels).map_err(|what| reader.fault(what))
    }

    /// The sizes of a voice of Piper, whose configuration has none: by its tensors, and by what the ONNX file says of
    /// its convolutions.
    pub(super) fn of_tensors(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader::whole(checkpoint);
        if checkpoint.seed().is_some() {
            return Err(Error::new(
                ErrorKind::Artifact,
                "a voice of Piper is its weights: its configuration alone has no sizes",
            )
            .hint("give its .onnx file"));
        }
        let shape = |name: &str, rank: usize| -> Result<Vec<usize>> {
            let found = checkpoint.stored(name).map(|(_, shape)| shape).unwrap_or_default();
            if found.len() == rank && found.iter().all(|n| *n > 0) {
                return Ok(found);
            }
            let what = format!(
                "{}: tensor {} has shape {found:?}, expected {rank} dimensions",
                checkpoint.path().display(),
                other(name)
            );
            Err(Error::new(ErrorKind::Artifact, what)
                .hint("it is no voice of Piper, or of a kind that is not known"))
        };
        let count = |name: &dyn Fn(usize) -> String| {
            (0..MAX_LAYERS).take_while(|at| checkpoint.stored(&name(*at)).is_some()).count()
        };
        let convolution = |name: &str, key: &str| -> Result<usize> {
            let at = other(&format!("{name}."));
            let at = at.trim_end_matches('.');
            let found =
                reader.get("convolutions").and_then(|all| all.get(at)?.get(key)?.get(0)?.as_u64());
            found.filter(|n| (1..=MAX_REACH as u64).contains(n)).map(|n| n as usize).ok_or_else(
                || {
                    reader.fault(format!(
                        "the file says no {key} of the convolution {at} from 1 to {MAX_REACH}"
                    ))
                },
            )
        };
        let embedding = shape("text_encoder.embed_tokens.weight", 2)?;
        let (tokens, hidden) = (embedding[0], embedding[1]);
        let relative = shape("text_encoder.encoder.layers.0.attention.emb_rel_k", 3)?;
        let inner = shape("text_encoder.encoder.layers.0.feed_forward.conv_1.weight", 3)?;
        let flow = shape("text_encoder.project.weight", 3)?[0] / 2;
        let durations = if checkpoint.stored("duration_predictor.conv_1.weight").is_some() {
            let first = shape("duration_predictor.conv_1.weight", 3)?;
            Durations::Plain { inner: first[0], kernel: first[2] }
        } else {
            let flows = 2..MAX_LAYERS;
            let at = |flow: usize| format!("duration_predictor.flows.{flow}.conv_proj.weight");
            let flows =
                flows.take_while(|flow| checkpoint.stored(&at(*flow)).is_some()).count() + 1;
            Durations::Stochastic {
                kernel: shape("duration_predictor.conv_dds.convs_dilated.0.weight", 3)?[2],
                layers: count(&|at| {
                    format!("duration_predictor.conv_dds.convs_dilated.{at}.weight")
                }),
                flows,
                bins: (shape(&at(2), 3)?[0] + 1) / 3,
                tail: 5.0,
            }
        };
        let layer = |at: usize| format!("flow.flows.0.wavenet.in_layers.{at}");
        let wavenet = Wavenet {
            layers: count(&|at| format!("{}.bias", layer(at))),
            kernel: shape(&format!("{}.weight", layer(0)), 3)?[2],
            dilation: convolution(&layer(1), "dilations").unwrap_or(1),
        };
        let initial = shape("decoder.conv_pre.weight", 3)?[0];
        let stage = |at: usize| format!("decoder.upsampler.{at}");
        let stages = count(&|at| format!("{}.weight", stage(at)));
        let rates =
            (0..stages).map(|at| convolution(&stage(at), "strides")).collect::<Result<Vec<_>>>()?;
        let kernels = (0..stages)
            .map(|at| Ok(shape(&format!("{}.weight", stage(at)), 3)?[2]))
            .collect::<Result<Vec<_>>>()?;
        let paired = checkpoint.stored("decoder.resblocks.0.convs1.0.weight").is_some();
        let part = if paired { "convs1" } else { "convs" };
        let conv = |block: usize, at: usize| format!("decoder.resblocks.{block}.{part}.{at}");
        let all = count(&|block| format!("{}.weight", conv(block, 0)));
        let mut blocks = Vec::new();
        for block in 0..all.checked_div(stages).unwrap_or(0) {
            let convs = count(&|at| format!("{}.weight", conv(block, at)));
            let dilations = (0..convs).map(|at| convolution(&conv(block, at), "dilations"));
            blocks.push((
                shape(&format!("{}.weight", conv(block, 0)), 3)?[2],
                dilations.collect::<Result<Vec<_>>>()?,
            ));
        }
        let (speakers, speaker) = match checkpoint.stored("embed_speaker.weight") {
            None => (1, 0),
            Some(_) => {
                let found = shape("embed_speaker.weight", 2)?;
                (found[0], found[1])
            }
        };
        let settings = |part: &str, key: &str, default: f64, max: f64| -> Result<f64> {
            let whole = reader.get(part).unwrap_or(&Value::Null);
            let Some(found) = whole.get(key) else { return Ok(default) };
            let fits = found.as_f64().filter(|n| (0.0..=max).contains(n));
            fits.ok_or_else(|| {
                reader.bad(&format!("{part}.{key}"), found, &format!("a number from 0 to {max}"))
            })
        };
        let rate = settings("audio", "sample_rate", 22_050.0, 192_000.0)?;
        let length = settings("inference", "length_scale", 1.0, 16.0)?;
        if rate < 1.0 || rate.fract() > 0.0 || length <= 0.0 {
            return Err(reader.fault(format!(
                "audio.sample_rate {rate}, inference.length_scale {length}: expected a whole number, and one above 0"
            )));
        }
        let config = Self {
            tokens,
            hidden,
            layers: count(&|at| {
                format!("text_encoder.encoder.layers.{at}.attention.q_proj.weight")
            }),
            heads: hidden / relative[2],
            window: relative[1] / 2,
            inner: inner[0],
            kernel: inner[2],
            biased: true,
            eps: 1e-5,
            flow,
            speakers,
            speaker,
            durations,
            couplings: count(&|at| format!("flow.flows.{at}.conv_pre.weight")),
            wavenet,
            decoder: Decoder { initial, rates, blocks, paired, slope: 0.1 },
            rate: rate as usize,
            length,
            noise: [
                settings("inference", "noise_scale", 0.667, 16.0)?,
                settings("inference", "noise_w", 0.8, 16.0)?,
            ],
        };
        config.checked(&kernels).map_err(|what| reader.fault(what))
    }

    /// The configuration, or what in it no graph computes.
    fn checked(self, kernels: &[usize]) -> std::result::Result<Self, String> {
        let Self { hidden, heads, flow, wavenet, ref decoder, .. } = self;
        let Decoder { initial, ref rates, ref blocks, .. } = *decoder;
        if heads == 0 || !hidden.is_multiple_of(heads) || flow % 2 > 0 || flow == 0 {
            return Err(format!(
                "{hidden} channels, {heads} heads, frames of {flow}: expected heads that divide the channels, and \
                 frames of an even number"
            ));
        }
        let doubled = rates.iter().map(|rate| 2 * rate).eq(kernels.iter().copied());
        let halves = u32::try_from(rates.len())
            .ok()
            .and_then(|n| 1usize.checked_shl(n))
            .unwrap_or(usize::MAX);
        if !doubled
            || rates.is_empty()
            || rates.iter().any(|rate| rate % 2 > 0)
            || initial % halves > 0
        {
            return Err(format!(
                "rates {rates:?}, kernels {kernels:?}, {initial} channels: expected even rates, kernels of twice them, \
                 and channels that can be halved as often"
            ));
        }
        let odd = |n: usize| n % 2 == 1;
        let kernels_of = blocks.iter().map(|(kernel, _)| *kernel);
        let durations = match self.durations {
            Durations::Stochastic { kernel, .. } | Durations::Plain { kernel, .. } => kernel,
        };
        if !kernels_of.chain([wavenet.kernel, durations]).all(odd) || blocks.is_empty() {
            return Err("expected residual blocks, and kernels of odd size".to_owned());
        }
        let reach =
            u32::try_from(wavenet.layers).ok().and_then(|n| wavenet.dilation.checked_pow(n));
        if wavenet.layers == 0
            || self.couplings == 0
            || self.layers == 0
            || reach.is_none_or(|n| n > 1 << 12)
        {
            return Err(format!(
                "{} layers, {} couplings, {wavenet:?}: expected one of each at least, and dilations below 4096",
                self.layers, self.couplings
            ));
        }
        Ok(self)
    }

    /// Samples of a frame.
    pub(super) fn hop(&self) -> usize {
        self.decoder.rates.iter().product()
    }

    /// Frames on either side that a sample depends on.
    pub(super) fn context(&self) -> usize {
        let Wavenet { layers, kernel, dilation } = self.wavenet;
        let layer = |at: usize| (kernel / 2) * dilation.saturating_pow(at as u32);
        let flows = self.couplings * (0..layers).map(layer).sum::<usize>();
        let block = |(kernel, dilations): &(usize, Vec<usize>)| {
            let second = if self.decoder.paired { kernel / 2 } else { 0 };
            dilations.iter().map(|dilation| kernel / 2 * dilation + second).sum::<usize>()
        };
        let widest = self.decoder.blocks.iter().map(block).max().unwrap_or_default();
        // The last convolution and the first have a kernel of 7.
        let samples = self
            .decoder
            .rates
            .iter()
            .rev()
            .fold(3, |reach: usize, rate| (reach + widest).div_ceil(*rate) + 1);
        flows + samples + 3
    }
}

fn bounded(reader: &Reader<'_>, key: &str, found: usize, max: usize) -> Result<usize> {
    match (1..=max).contains(&found) {
        true => Ok(found),
        false => Err(reader.bad(key, &json!(found), &format!("a number from 1 to {max}"))),
    }
}

fn sizes(list: &Value) -> Option<Vec<usize>> {
    let size = |value: &Value| {
        value.as_u64().filter(|n| (1..=MAX_REACH as u64).contains(n)).map(|n| n as usize)
    };
    list.as_array().filter(|list| list.len() <= 16)?.iter().map(size).collect()
}
