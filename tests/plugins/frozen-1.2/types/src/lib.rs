//! The calls of an op, in the order of the table of functions, as they were at 1.2.

#[macro_export]
macro_rules! op_calls {
    ($then:ident) => {
        $then! {
            {
                /// Forgets everything: position 0.
                since 1.0, Generator: reset() -> Done, At(0)
            }
            {
                /// Consumes segments; gives the logits of the last position. An image, audio clip or video takes the
                /// positions that `place` declared.
                since 1.0, Generator: prefill(segments: Segments<'_, '_>) -> Logits, Consumes(positions(segments))
            }
            {
                /// Consumes one token; gives the logits of its position.
                since 1.0, Generator: decode(token: Token) -> Logits, Consumes(Some(1))
            }
            {
                /// Positions consumed so far.
                since 1.0, Generator: position() -> Position, Nothing
            }
            {
                /// Forgets all positions from `position` on.
                since 1.0, Generator: truncate(position: Number) -> Done, BackTo(position)
            }
            {
                /// Saves the state.
                since 1.0, Generator: snapshot() -> Saved, Stays
            }
            {
                /// Returns to a saved state, which stays saved.
                since 1.0, Generator: restore(snapshot: SnapshotId) -> Done, Returns(snapshot)
            }
            {
                /// Frees a saved state. An unknown id is ignored.
                since 1.0, Generator: drop_snapshot(snapshot: SnapshotId), Drops(snapshot)
            }
            {
                /// Embeds one text: pooling and normalisation are the op's.
                since 1.0, Encoder: embed(segments: Segments<'_, '_>) -> Vectors, Embeds(1), #[sabi(last_prefix_field)]
            }
            {
                /// Where an image, audio clip or video stands among the tokens of a prompt, and how many positions it
                /// takes. Called before it is consumed, also more than once.
                since 1.1, Generator: place(segment: Segment<'_>) -> Placed, Nothing
            }
            {
                /// Runs tokens, at most as many as the widest of `OpenInfo::verification`, through the graphs of one
                /// step. The position stays: nothing is accepted until `accept`, and nothing is when another call comes
                /// first that changes the state. There are no logits until `row_logits`.
                since 1.2, Generator: verify(tokens: Tokens<'_>) -> Done, Drafts
            }
            {
                /// Gives the logits of the position of token `row` of the last `verify`. Rows may be left out.
                since 1.2, Generator: row_logits(row: Number) -> Logits, Nothing
            }
            {
                /// Keeps the first `count` tokens of the last `verify` and forgets the others: the state is as if they
                /// alone had been consumed. Called at most once after each `verify`.
                since 1.2, Generator: accept(count: Number) -> Done, Accepts(count)
            }
            {
                /// Embeds texts in one execution of the graphs, as if each were alone. Together they have at most as
                /// many tokens as the longest of `OpenInfo::packing`. Gives `OpenInfo::embedding_dim` values a text,
                /// one text behind the other.
                since 1.2, Encoder: embed_many(texts: Texts<'_, '_>) -> Vectors, Embeds(texts.len())
            }
        }
    };
}
