//! A decoder layer of the usual form.

use qhx_base::Result;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::TensorId;

use super::attention::{Attend, Attention};
use super::layers::{Layers, Mlp};

impl Layers<'_> {
    /// A decoder layer of the usual form on rows `[rows, hidden]`: [`Layers::attention`] and a SwiGLU
    /// ([`Layers::mlp`] with SiLU), each after an RMSNorm and added to the rows. `name` is where its tensors are,
    /// `layers.3`; the scopes are `l3_attn` and `l3_mlp`.
    ///
    /// # Errors
    /// When a tensor is missing, or shapes do not fit.
    pub fn block(
        &self,
        b: &mut GraphBuilder,
        h: TensorId,
        name: &str,
        attention: &Attention<'_>,
        mlp: &Mlp<'_>,
        attend: &Attend,
    ) -> Result<TensorId> {
        let [h, normed] = self.attention_block(b, h, name, attention, attend)?;
        let out = self.mlp(b, normed, mlp, GraphBuilder::silu)?;
        b.add(h, out)
    }

    /// The first half of [`Layers::block`]: the rows after attention, and the same normalised for what follows.
    ///
    /// # Errors
    /// Errors of [`Layers::block`].
    pub fn attention_block(
        &self,
        b: &mut GraphBuilder,
        h: TensorId,
        name: &str,
        attention: &Attention<'_>,
        attend: &Attend,
    ) -> Result<[TensorId; 2]> {
        let layer = attention.layer;
        b.scope(format!("l{layer}_attn"));
        let normed = self.norm(b, h, &format!("{name}.input_layernorm"))?;
        let mixed = self.attention(b, normed, attention, attend)?;
        let h = b.add(h, mixed)?;
        b.scope(format!("l{layer}_mlp"));
        let normed = self.norm(b, h, &format!("{name}.post_attention_layernorm"))?;
        Ok([h, normed])
    }
}
