//! Gemma 3 text as an encoder: `Gemma3TextModel` with `use_bidirectional_attention`, such as EmbeddingGemma.
//!
//! Arithmetic: `transformers`, `models/gemma3/modeling_gemma3.py`. Graphs `enc` take S tokens, a text with its padding.
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `x` → `y` | `[S, hidden]` | embedding rows times `params.embed_scale` in; normalised rows out |
//! | `cos`, `sin`; `cos_local`, `sin_local` | `[S, head_dim / 2]` | half tables of full and of sliding layers |
//! | `cmask` | `[S, S]`, or `[1, S]` where S > 512 | added to scores; hides padding, and texts from each other |
//! | `cmask_local` | `[S, S]` | as `cmask`, and hides positions further than `params.local.reach` |

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use serde_json::json;

use super::super::encoder::{self, Encoder, bidirectional, max_text};
use super::layers::{Config, Model};
use crate::kit::{AttendInputs, DecoderParams, Reader, check_shape, object};
use crate::recipe::{Recipe, RecipeOptions, Task};
use crate::register_recipe;
use crate::registry::RecipeEntry;

register_recipe!(
    RecipeEntry::new(&["Gemma3TextModel"], recipe)
        .tasks(&[Task::Embed])
        .prefill_graphs()
        .longest(|checkpoint, _| max_text(checkpoint).ok()?)
        .options(&encoder::OPTIONS)
);

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let config = Config::read(checkpoint, true)?;
    let Config { hidden, vocab, heads, window, full, local, .. } = config;
    if full.factor.or(local.factor).is_some() {
        return Err(Reader::new(checkpoint).fault(
            "rope_scaling or rope_parameters scales frequencies, expected those of an encoder as they are".to_owned(),
        ));
    }
    let layers = config.sliding.len();
    check_shape(options, layers, Some(config.max_positions))?;
    let causal = !bidirectional(checkpoint.config());
    let encoder = Encoder::read(checkpoint, options, hidden, causal)?;
    let mut params =
        DecoderParams { hidden, vocab, layers, heads, rope_theta: full.theta }.map(options.max_ctx);
    // `Gemma3TextConfig` makes the window w / 2 + 1, of which the token itself is one.
    params.extend(object(json!({
        "embed_scale": config.embed_scale,
        "local": {"reach": window / 2, "head_dim": heads.dim, "rope_theta": local.theta},
    })));
    let model = Model::new(checkpoint, options, &config);
    let embed = checkpoint.matrix("embed_tokens.weight", [vocab, hidden])?;
    encoder.recipe("gemma3", options, (layers, embed), params, |name, range, rows, mask_rows| {
        let inputs = AttendInputs { mask_rows, ..AttendInputs::new(heads.dim, rows, 0) };
        model.graph(name, range, inputs, 0)
    })
}
