//! A model from its files: description, tokenizer, chat template, weights.

use std::path::Path;
use std::sync::Arc;

use oscar_kernels::{Backend, KernelError};

use crate::config::{ModelConfig, from_gguf, from_hugging_face};
use crate::error::ModelError;
use crate::families::gemma3;
use crate::files::{FileError, Gguf, JsonFile, Safetensors, TensorSource, TextPart, WeightMemory};
use crate::forward::Model;
use crate::names::TensorNaming;
use crate::room::check_room;
use crate::sampling::SamplingDefaults;
use crate::source::ModelPath;
use crate::text::{ChatTemplate, GgufVocabulary, RenderOptions, RenderedText, TextError, Tokenizer};
use crate::weights::ModelWeights;

/// An opened model: everything but the weights.
pub struct ModelFiles {
    config: ModelConfig,
    naming: TensorNaming,
    tensors: Box<dyn TensorSource>,
    skipped_tensors: usize,
    tokenizer: Option<Arc<Tokenizer>>,
    /// A broken template must not stop work on plain text, so its error waits until the template is needed.
    chat_template: Result<ChatTemplate, TextError>,
    /// The error waits here too: a request that gives its own sampling settings needs no defaults.
    sampling_defaults: Result<SamplingDefaults, FileError>,
}

impl ModelFiles {
    /// Opens the files of a model, mapped, and checks that they belong together.
    pub fn open(path: &ModelPath) -> Result<ModelFiles, ModelError> {
        ModelFiles::open_in(path, WeightMemory::Mapped)
    }

    /// Does the same as [`Self::open`], with the weights in a given kind of memory.
    pub fn open_in(path: &ModelPath, memory: WeightMemory) -> Result<ModelFiles, ModelError> {
        let files = match path {
            ModelPath::Gguf(path) => ModelFiles::open_gguf(path, memory)?,
            ModelPath::Folder(path) => ModelFiles::open_folder(path, memory)?,
        };
        if let Some(tokenizer) = &files.tokenizer {
            tokenizer
                .check_embedding_rows(files.config.vocab_size)
                .map_err(|source| in_file(path.path(), source))?;
        }
        Ok(files)
    }

    fn open_gguf(path: &Path, memory: WeightMemory) -> Result<ModelFiles, ModelError> {
        let text = |source| in_file(path, source);
        let gguf = Gguf::open_in(path, memory)?;
        let config = from_gguf(&gguf)?;
        let vocabulary = GgufVocabulary::from_gguf(&gguf).map_err(text)?;
        let tokenizer = Tokenizer::from_gguf_vocabulary(&vocabulary).map_err(text)?;
        let chat_template = ChatTemplate::from_gguf(&gguf);
        let sampling_defaults = SamplingDefaults::from_gguf(&gguf);
        Ok(ModelFiles {
            config,
            naming: TensorNaming::Gguf,
            tensors: Box::new(gguf),
            skipped_tensors: 0,
            tokenizer: Some(Arc::new(tokenizer)),
            chat_template,
            sampling_defaults,
        })
    }

    fn open_folder(folder: &Path, memory: WeightMemory) -> Result<ModelFiles, ModelError> {
        let text = |source| in_file(folder, source);
        let description = JsonFile::open(&folder.join("config.json"))?;
        let config = from_hugging_face(&description)?;
        let mut tensors: Box<dyn TensorSource> = Box::new(Safetensors::open_folder_in(folder, memory)?);
        let mut skipped_tensors = 0;
        if gemma3::has_images(&description.fields())? {
            let text = TextPart::new(tensors, gemma3::text_name)?;
            (skipped_tensors, tensors) = (text.left_out(), Box::new(text));
        }
        let tokenizer = if folder.join("tokenizer.json").exists() {
            Some(Arc::new(Tokenizer::from_folder(folder).map_err(text)?))
        } else {
            None
        };
        let chat_template = ChatTemplate::from_folder(folder);
        Ok(ModelFiles {
            config,
            naming: TensorNaming::HuggingFace,
            tensors,
            skipped_tensors,
            tokenizer,
            chat_template,
            sampling_defaults: SamplingDefaults::from_folder(folder),
        })
    }

    /// Files that were made, not opened.
    pub(crate) fn made(
        config: ModelConfig,
        naming: TensorNaming,
        tensors: Box<dyn TensorSource>,
        tokenizer: Tokenizer,
    ) -> ModelFiles {
        ModelFiles {
            config,
            naming,
            tensors,
            skipped_tensors: 0,
            tokenizer: Some(Arc::new(tokenizer)),
            chat_template: Err(TextError::NoChatTemplate),
            sampling_defaults: Ok(SamplingDefaults::default()),
        }
    }

    /// The shape of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The tensors as the files store them.
    pub fn tensors(&self) -> &dyn TensorSource {
        &*self.tensors
    }

    /// How many tensors of the files belong to parts that are not run, such as those that see images. They are not among
    /// [`Self::tensors`].
    pub fn skipped_tensors(&self) -> usize {
        self.skipped_tensors
    }

    /// The tokenizer, if the files hold one.
    pub fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        self.tokenizer.as_ref()
    }

    /// The chat template, or why there is none.
    pub fn chat_template(&self) -> Result<&ChatTemplate, &TextError> {
        self.chat_template.as_ref()
    }

    /// The sampling settings that the model's makers recommend, or what is wrong with the file that has them.
    pub fn sampling_defaults(&self) -> Result<&SamplingDefaults, &FileError> {
        self.sampling_defaults.as_ref()
    }

    /// The forward pass alone, for work on token ids.
    pub fn load_model<B: Backend>(&self, backend: Arc<B>) -> Result<Model<B>, ModelError> {
        self.load_layers(backend, |_| {})
    }

    fn load_layers<B: Backend>(
        &self,
        backend: Arc<B>,
        on_layer: impl FnMut(usize),
    ) -> Result<Model<B>, ModelError> {
        if let Some(feature) = self.config.features().into_iter().find(|&need| !backend.supports(need)) {
            return Err(KernelError::Unsupported(feature).into());
        }
        check_room(&*backend, &*self.tensors, self.naming, &self.config)?;
        let weights = ModelWeights::load(&*backend, &*self.tensors, self.naming, &self.config, on_layer)?;
        backend.finish_weights();
        Ok(Model::new(backend, self.config.clone(), weights))
    }

    /// Loads the weights; the files must hold a tokenizer.
    pub fn load<B: Backend>(self, backend: Arc<B>) -> Result<LoadedModel<B>, ModelError> {
        self.load_with(backend, |_| {})
    }

    /// The same; `on_layer` hears how many layers are loaded, which takes a while where weights are copied.
    pub fn load_with<B: Backend>(
        self,
        backend: Arc<B>,
        on_layer: impl FnMut(usize),
    ) -> Result<LoadedModel<B>, ModelError> {
        let model = self.load_layers(backend, on_layer)?;
        let Some(tokenizer) = self.tokenizer else {
            let path = self.tensors.path().to_path_buf();
            return Err(ModelError::BadConfig {
                path,
                problem: "there is no `tokenizer.json` beside the weights".into(),
            });
        };
        let (chat_template, sampling_defaults) = (self.chat_template, self.sampling_defaults);
        Ok(LoadedModel { model, tokenizer, chat_template, sampling_defaults })
    }
}

/// An error of the tokenizer, with the file it comes from.
fn in_file(path: &Path, source: TextError) -> ModelError {
    match source {
        TextError::ModelFile(error) => error.into(),
        source => ModelError::Text { path: path.to_path_buf(), source },
    }
}

/// Why a chat could not be encoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError<'a> {
    /// The model has no template, or a broken one.
    #[error("{0}")]
    Template(&'a TextError),
    /// The messages do not fit the template.
    #[error(transparent)]
    Messages(#[from] TextError),
}

/// A model with weights, tokenizer and chat template.
pub struct LoadedModel<B: Backend> {
    model: Model<B>,
    tokenizer: Arc<Tokenizer>,
    chat_template: Result<ChatTemplate, TextError>,
    sampling_defaults: Result<SamplingDefaults, FileError>,
}

impl<B: Backend> LoadedModel<B> {
    /// Opens the files and loads the weights.
    pub fn load(path: &ModelPath, backend: Arc<B>) -> Result<LoadedModel<B>, ModelError> {
        ModelFiles::open(path)?.load(backend)
    }

    /// The weights on the device, and the forward pass over them.
    pub fn model(&self) -> &Model<B> {
        &self.model
    }

    /// The shape of the model.
    pub fn config(&self) -> &ModelConfig {
        self.model.config()
    }

    /// The tokenizer that came with the model.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The chat template, or why there is none.
    pub fn chat_template(&self) -> Result<&ChatTemplate, &TextError> {
        self.chat_template.as_ref()
    }

    /// The sampling settings that the model's makers recommend, or what is wrong with the file that has them.
    pub fn sampling_defaults(&self) -> Result<&SamplingDefaults, &FileError> {
        self.sampling_defaults.as_ref()
    }

    /// The tokens of a chat, rendered with the model's template, up to where the model answers.
    pub fn encode_chat(&self, messages: &[serde_json::Value]) -> Result<Vec<u32>, ChatError<'_>> {
        Ok(self.tokenizer.encode_rendered(&self.render_chat(messages)?)?)
    }

    /// The text of a chat, rendered with the model's template, up to where the model answers. Control tokens in messages
    /// stay text.
    pub fn render_chat(&self, messages: &[serde_json::Value]) -> Result<RenderedText, ChatError<'_>> {
        let template = self.chat_template().map_err(ChatError::Template)?;
        let tokenizer = &self.tokenizer;
        let token_text = |id: Option<u32>| id.map(|id| tokenizer.token_text(id)).transpose();
        let bos_token = token_text(tokenizer.bos_id())?.unwrap_or_default();
        let eos_token = token_text(tokenizer.eos_id())?.unwrap_or_default();
        let options = RenderOptions {
            add_generation_prompt: true,
            bos_token: &bos_token,
            eos_token: &eos_token,
            ..RenderOptions::default()
        };
        Ok(template.render_literally(messages, &options, tokenizer.control_tokens())?)
    }

    /// Whether the model ends its turn with this token.
    pub fn is_end(&self, token: u32) -> bool {
        self.tokenizer.is_end(token)
    }
}
