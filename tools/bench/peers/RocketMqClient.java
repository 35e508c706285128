import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** The RocketMQ side of the rows: MODE ADDRESS TOPIC COUNT [EACH]; the last line of its output is the figure as JSON. */
public class RocketMqClient {
    static final byte[] PAYLOAD = new byte[100];
    static final int BATCH = 1000;

    public static void main(String[] arguments) {
        int status = 0;
        try {
            run(arguments);
        } catch (Exception failure) {
            failure.printStackTrace();
            status = 1;
        }
        System.exit(status); // The client's threads would keep the process alive.
    }

    static void run(String[] arguments) throws Exception {
        Arrays.fill(PAYLOAD, (byte) 'x');
        String mode = arguments[0], address = arguments[1], topic = arguments[2];
        int count = Integer.parseInt(arguments[3]);
        double figure = switch (mode) {
            case "produce" -> produce(address, topic, count);
            case "consume" -> consume(address, topic, count);
            case "one_at_a_time" -> oneAtATime(address, topic, count);
            case "clients" -> clients(address, topic, count, Integer.parseInt(arguments[4]));
            default -> throw new IllegalArgumentException(mode);
        };
        System.out.println();
        System.out.println(figure);
    }

    static DefaultMQProducer producer(String address) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("bench" + System.nanoTime());
        producer.setNamesrvAddr(address);
        producer.setSendMsgTimeout(30_000);
        producer.setDefaultTopicQueueNums(1);
        producer.setMaxMessageSize(4 << 20);
        producer.start();
        return producer;
    }

    static void expectOk(SendResult result) {
        if (result.getSendStatus() != SendStatus.SEND_OK) throw new IllegalStateException(result.toString());
    }

    /** Messages per second in batches of BATCH, 8 threads, one queue. */
    static double produce(String address, String topic, int count) throws Exception {
        DefaultMQProducer producer = producer(address);
        expectOk(producer.send(new Message(topic, PAYLOAD)));
        List<Message> batch = new ArrayList<>();
        for (int n = 0; n < BATCH; n++) batch.add(new Message(topic, PAYLOAD));
        int threads = 8, each = count / BATCH / threads;
        double seconds = inThreads(threads, () -> {
            for (int n = 0; n < each; n++) expectOk(producer.send(new ArrayList<>(batch)));
        });
        return threads * (double) each * BATCH / seconds;
    }

    /** Messages per second from the first message received. */
    static double consume(String address, String topic, int count) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer("bench" + System.nanoTime());
        consumer.setNamesrvAddr(address);
        consumer.setPullBatchSize(1024);
        consumer.setConsumeFromWhere(org.apache.rocketmq.common.consumer.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        consumer.start();
        long begun = 0;
        int got = 0, first = 0;
        while (got < count) {
            List<MessageExt> messages = consumer.poll(1000);
            if (messages.isEmpty()) continue;
            if (begun == 0) {
                begun = System.nanoTime();
                first = messages.size();
            }
            for (MessageExt message : messages) if (message.getBody().length == 0) throw new IllegalStateException();
            got += messages.size();
        }
        return (got - first) / ((System.nanoTime() - begun) / 1e9);
    }

    /** Median seconds of one synchronous send. */
    static double oneAtATime(String address, String topic, int count) throws Exception {
        DefaultMQProducer producer = producer(address);
        expectOk(producer.send(new Message(topic, PAYLOAD)));
        long[] times = new long[count];
        for (int n = 0; n < count; n++) {
            long begun = System.nanoTime();
            expectOk(producer.send(new Message(topic, PAYLOAD)));
            times[n] = System.nanoTime() - begun;
        }
        Arrays.sort(times);
        return times[count / 2] / 1e9;
    }

    /** Messages per second of `count` threads that each wait for every answer. */
    static double clients(String address, String topic, int count, int each) throws Exception {
        DefaultMQProducer producer = producer(address);
        expectOk(producer.send(new Message(topic, PAYLOAD)));
        double seconds = inThreads(count, () -> {
            for (int n = 0; n < each; n++) expectOk(producer.send(new Message(topic, PAYLOAD)));
        });
        return count * (double) each / seconds;
    }

    interface Work {
        void run() throws Exception;
    }

    static double inThreads(int count, Work work) throws Exception {
        List<Thread> threads = new ArrayList<>();
        List<Exception> failures = new ArrayList<>();
        for (int n = 0; n < count; n++) {
            threads.add(new Thread(() -> {
                try {
                    work.run();
                } catch (Exception failure) {
                    synchronized (failures) {
                        failures.add(failure);
                    }
                }
            }));
        }
        long begun = System.nanoTime();
        for (Thread thread : threads) thread.start();
        for (Thread thread : threads) thread.join();
        if (!failures.isEmpty()) throw failures.get(0);
        return (System.nanoTime() - begun) / 1e9;
    }
}
