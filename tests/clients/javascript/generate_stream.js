// node generate_stream.js ADDRESS PROTOS PROMPT, such as 127.0.0.1:9000 protos "Once upon a time"
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const [address, protos, prompt] = process.argv.slice(2);
const definition = protoLoader.loadSync("specdec/v1/inference.proto", {
  includeDirs: [protos],
  keepCase: true, // max_tokens, not maxTokens
  longs: String, // a seed has 63 bits, more than a JavaScript number holds
  enums: String,
  defaults: true, // a chunk without text has "", not undefined
});
const { InferenceService } = grpc.loadPackageDefinition(definition).specdec.v1;
const client = new InferenceService(address, grpc.credentials.createInsecure());

const metadata = new grpc.Metadata();
if (process.env.SPECDEC_API_KEY) {
  metadata.set("authorization", `Bearer ${process.env.SPECDEC_API_KEY}`);
}
const call = client.GenerateStream(
  {
    text: prompt,
    sampling: { temperature: 0.8, seed: "7", max_tokens: 64 },
    speculation: { num_speculative_tokens: 5 },
  },
  metadata,
  { deadline: Date.now() + 60_000 },
);
call.on("data", (chunk) => {
  process.stdout.write(chunk.text);
  if (chunk.usage) {
    const { num_draft_tokens, num_accepted_tokens } = chunk.usage.speculation;
    console.error(`\n${num_accepted_tokens} of ${num_draft_tokens} draft tokens accepted`);
  }
});
call.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
call.on("close", () => client.close());
