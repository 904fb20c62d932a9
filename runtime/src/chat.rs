//! A conversation: its messages so far, and the answers that follow.

use qhx_base::{CancelToken, Result, bail, error, setters};
use qhx_core::engine::{Event, FinishReason, Generation, Message, Model, Prompt, Request, Run};
use qhx_core::op::Task;
use qhx_core::sampling::SamplingParams;

use crate::media::{self, Attached, Attachment};

/// A conversation with a model, which keeps its state between turns: a turn consumes only what is new.
///
/// ```no_run
/// let mut chat = qhx::Bundle::open("qwen35/v81")?.chat()?;
/// chat.begin(Some("Answer in one sentence."))?;
/// for piece in chat.send("What is a river?")? {
///     print!("{}", piece?);
/// }
/// # Ok::<(), qhx::Error>(())
/// ```
#[derive(Debug)]
pub struct Chat {
    model: Model,
    messages: Vec<Message>,
    attached: Vec<Attached>,
    request: Request,
    thinking: Option<bool>,
}

impl Chat {
    /// Maximum number of tokens of an answer, if nothing else is asked for.
    pub const MAX_NEW: usize = 1024;

    /// Begins a conversation without a system message. Tokens are chosen as the bundle has it
    /// ([`Model::sampling`]), or greedily.
    ///
    /// # Errors
    /// When the model does not chat.
    pub fn new(model: Model) -> Result<Self> {
        model.require(Task::Generate, "chat")?;
        if !model.can_chat() {
            let path = model.manifest().path.display();
            return Err(error!(Usage, "{path}: the model does not chat").hint(
                "a bundle chats when its manifest has `chat`, or when a chat_template.jinja or a \
                 tokenizer_config.json with a chat_template lies beside the tokenizer; `qhx generate` \
                 completes a text without either",
            ));
        }
        let sampling = model.sampling().cloned().unwrap_or_default();
        Ok(Self {
            model,
            messages: Vec::new(),
            attached: Vec::new(),
            request: Request::chat([]).max_new(Self::MAX_NEW).sampling(sampling),
            thinking: None,
        })
    }

    setters! {
        /// Request that later answers are made with. Its prompt and its cancel token are ignored.
        with_request(request: Request) => request = request,
        /// Sampling parameters for later answers.
        with_sampling(sampling: SamplingParams) => request.sampling = sampling,
        /// Turns thinking before the answer on or off, for chat templates that support it.
        with_thinking(thinking: Option<bool>) => thinking = thinking,
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The model, to set a draft model, say.
    pub fn model_mut(&mut self) -> &mut Model {
        &mut self.model
    }

    /// The messages so far.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Forgets the conversation, and begins another one with this system message.
    ///
    /// # Errors
    /// When the host-op cannot be reset.
    pub fn begin(&mut self, system: Option<&str>) -> Result<()> {
        self.messages.clear();
        self.attached.clear();
        self.messages.extend(system.map(|text| Message::new("system", text)));
        self.model.reset()
    }

    /// Forgets the conversation but for its system message.
    ///
    /// # Errors
    /// When the host-op cannot be reset.
    pub fn reset(&mut self) -> Result<()> {
        let system = self.messages.first().filter(|message| message.role == "system").cloned();
        let system = system.as_ref().and_then(|message| message.content.texts().next());
        self.begin(system)
    }

    /// Decodes a file for the next message: an image, audio clip or video that stands before its text, or at its
    /// placeholder.
    ///
    /// # Errors
    /// Errors of [`Attachment::read`].
    pub fn attach(&mut self, attachment: &Attachment) -> Result<&Attached> {
        self.attached.push(attachment.read(&self.model, None)?);
        self.attached.last().ok_or_else(|| error!(Internal, "nothing is attached"))
    }

    /// Attachments of the next message.
    pub fn attached(&self) -> &[Attached] {
        &self.attached
    }

    /// The next message, whose answer begins: the run generates as far as it is asked to. A message that cannot be
    /// used is left out of the conversation, with what was attached to it.
    ///
    /// # Errors
    /// Errors of [`Model::start`], and when the numbers of placeholders and attachments differ.
    pub fn send(&mut self, text: impl Into<String>) -> Result<ChatRun<'_>> {
        self.send_with(text, CancelToken::new())
    }

    /// Same as [`Chat::send`], with a token that cancels this answer.
    ///
    /// # Errors
    /// Errors of [`Chat::send`].
    pub fn send_with(
        &mut self,
        text: impl Into<String>,
        cancel: CancelToken,
    ) -> Result<ChatRun<'_>> {
        let attached = std::mem::take(&mut self.attached);
        let content = media::content(text.into(), &attached)?;
        self.messages.push(Message::new("user", content));
        let request = self.asked(cancel);
        match self.model.start(&request) {
            Ok(run) => Ok(ChatRun { run: Some(run), messages: &mut self.messages, attached }),
            Err(e) => {
                self.messages.pop();
                Err(e)
            }
        }
    }

    /// Adds a message that is there already, such as one of an earlier conversation, or the beginning of an answer
    /// that [`Chat::resume`] goes on with.
    pub fn push(&mut self, message: Message) {
        self.messages.push(message);
    }

    /// Goes on with the last message of the assistant, such as an answer that was cut. The run is what is added to it.
    ///
    /// # Errors
    /// The errors of [`Model::start`], and when the last message is not the assistant's.
    pub fn resume(&mut self, cancel: CancelToken) -> Result<ChatRun<'_>> {
        if !Message::goes_on(&self.messages) {
            bail!(
                Usage,
                "the last message of the conversation is not the assistant's: there is nothing to go on with"
            );
        }
        let request = self.asked(cancel);
        let run = self.model.start(&request)?;
        Ok(ChatRun { run: Some(run), messages: &mut self.messages, attached: Vec::new() })
    }

    /// The request of an answer to the messages so far.
    fn asked(&self, cancel: CancelToken) -> Request {
        let prompt = Prompt::Chat { messages: self.messages.clone(), thinking: self.thinking };
        self.request.clone().prompt(prompt).cancelled_by(cancel)
    }
}

/// An answer under way. It is part of the conversation once it is finished or dropped, as far as it came then.
#[derive(Debug)]
pub struct ChatRun<'c> {
    run: Option<Run<'c>>,
    messages: &'c mut Vec<Message>,
    attached: Vec<Attached>,
}

impl<'c> ChatRun<'c> {
    /// The images, audio and videos of the message.
    pub fn attached(&self) -> &[Attached] {
        &self.attached
    }

    /// Stops this answer from any thread.
    pub fn cancel_token(&self) -> Option<&CancelToken> {
        self.run.as_ref().map(Run::cancel_token)
    }

    /// Goes on to the next event: see [`Run::next_event`].
    ///
    /// # Errors
    /// Errors of [`Run::next_event`].
    pub fn next_event(&mut self) -> Result<Option<Event<'_>>> {
        match &mut self.run {
            Some(run) => run.next_event(),
            None => Ok(None),
        }
    }

    /// Ends the answer here: see [`Run::stop`].
    ///
    /// # Errors
    /// Errors of [`Run::stop`].
    pub fn stop(&mut self) -> Result<()> {
        self.run.as_mut().map_or(Ok(()), Run::stop)
    }

    /// The whole answer. Goes on to its end first.
    ///
    /// # Errors
    /// Errors of [`Run::finish`]; the message is then not part of the conversation.
    pub fn finish(mut self) -> Result<Generation> {
        self.settle()
    }

    fn settle(&mut self) -> Result<Generation> {
        let over = || error!(Usage, "the answer is finished");
        let generation = self.run.take().ok_or_else(over)?.finish();
        let resumed = Message::goes_on(self.messages);
        match &generation {
            // Cancelled before it was tokenized: the next turn is not to wait for it again.
            Ok(Generation { prompt_tokens: 0, .. }) | Err(_) if !resumed => {
                self.messages.pop();
            }
            Ok(generation) => match self.messages.last_mut().filter(|_| resumed) {
                Some(last) => last.content = last.content.with_text(&generation.text),
                None => self.messages.push(Message::assistant(&*generation.text)),
            },
            Err(_) => {}
        }
        generation
    }
}

impl Iterator for ChatRun<'_> {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Result<String>> {
        self.run.as_mut()?.next()
    }
}

impl Drop for ChatRun<'_> {
    fn drop(&mut self) {
        if let Some(run) = &mut self.run {
            // An error has been returned, or is of no more use.
            let _ = run.stop();
            let _ = self.settle();
        }
    }
}

/// True where an answer was cancelled before its message became part of the conversation.
pub fn is_left_out(generation: &Generation) -> bool {
    generation.prompt_tokens == 0 && generation.finish_reason == FinishReason::Cancelled
}
