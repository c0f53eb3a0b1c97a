// grpc-js as a client: a line of JSON says what to ask, a line of JSON tells what came.
const grpc = require("@grpc/grpc-js");

const same = (bytes) => bytes;

function unary(client, path, message) {
  let call;
  const reply = new Promise((resolve, reject) => {
    call = client.makeUnaryRequest(path, same, same, message, (error, value) => (error ? reject(error) : resolve(value)));
  });
  return { call, reply };
}

async function talk(job) {
  const [good, large, refused] = ["good", "large", "refused"].map((name) => job[name].map((one) => Buffer.from(one, "hex")));
  const hex = async (message) => (await unary(client, job.unary, message).reply).toString("hex");
  const client = new grpc.Client(job.address, grpc.credentials.createInsecure());
  const found = { good: [], large: [] };
  for (const one of good) found.good.push(await hex(one));
  found.together = await Promise.all(Array.from({ length: 100 }, () => hex(good[0])));
  for (const one of large) found.large.push(await hex(one));
  for (const one of refused) {
    await hex(one).catch((error) => {
      found.refused = grpc.status[error.code];
    });
  }
  const cancelled = unary(client, job.unary, large[0]);
  setTimeout(() => cancelled.call.cancel(), 10);
  await cancelled.reply.catch(() => {});
  found["after a cancel"] = [await hex(good[0])];
  found.stream = await new Promise((resolve, reject) => {
    const call = client.makeBidiStreamRequest(job.stream, same, same);
    const replies = [];
    call.on("data", (reply) => replies.push(reply.toString("hex")));
    call.on("error", reject);
    call.on("end", () => resolve(replies));
    for (const one of good) call.write(one);
    call.end();
  });
  client.close();
  return found;
}

let input = "";
process.stdin.on("data", (data) => (input += data));
process.stdin.on("end", async () => console.log(JSON.stringify(await talk(JSON.parse(input)))));
